"""`python -m jaxpar` is the `jaxpar` command."""

from jaxpar.cli import main

if __name__ == "__main__":
    main()
