"""`python -m eval.two_servers`."""

import sys

from eval.two_servers.run import main

if __name__ == "__main__":
    main(sys.argv[1:])
