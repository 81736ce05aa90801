"""Does a coach blame the right one? Episodes with planted faults, and what a coach makes of them."""
