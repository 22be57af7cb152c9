"""`python -m eval.fidelity`."""

import sys

from eval.fidelity.run import main

if __name__ == "__main__":
    main(sys.argv[1:])
