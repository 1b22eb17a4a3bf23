"""`python -m streamline`: the command line."""

from streamline.cli import main

if __name__ == "__main__":
    main(prog_name="python -m streamline")
