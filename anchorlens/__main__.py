"""`python -m anchorlens`, and `accelerate launch -m anchorlens` for several processes."""

from .cli.commands import main

if __name__ == "__main__":
    main()
