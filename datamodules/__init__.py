"""What a Trainer trains on: a live run, or the recording of one."""
