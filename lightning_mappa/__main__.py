"""`python -m lightning_mappa`: the same as the console script `mappa`."""

from lightning_mappa.cli import main

if __name__ == "__main__":
    main()
