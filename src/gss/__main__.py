"""`python -m gss` is the `gss` command."""

from gss.cli import main

if __name__ == "__main__":
    main()
