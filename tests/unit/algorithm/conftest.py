from hypothesis import settings

# No deadline: the first example pays for torch's start. Derandomized: a suite that is green stays green.
settings.register_profile("algorithm", deadline=None, derandomize=True, database=None)
settings.load_profile("algorithm")
