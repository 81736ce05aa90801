"""`mappa compare`: what several runs say together."""
