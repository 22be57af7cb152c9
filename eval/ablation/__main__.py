"""`python -m eval.ablation`."""

import sys

from eval.ablation.run import main

if __name__ == "__main__":
    main(sys.argv[1:])
