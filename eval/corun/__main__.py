"""`python -m eval.corun`."""

import sys

from eval.corun.run import main

if __name__ == "__main__":
    main(sys.argv[1:])
