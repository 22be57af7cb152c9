"""`python -m eval.fuzz`."""

import sys

from eval.fuzz.run import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
