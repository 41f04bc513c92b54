"""`python -m chainermn_tools` is the command `chainermn`."""

from chainermn_tools.cli import main

if __name__ == "__main__":
    main()
