"""Let `python -m echo_sgl.cli` be the `echo-sgl` command."""

from echo_sgl.cli import main

if __name__ == "__main__":
    main()
