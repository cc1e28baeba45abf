"""`python -m flexattn`: the command line without an installed script."""

from flexattn.cli import main

if __name__ == "__main__":
    main()
