"""`python -m eval.report_page`."""

import sys

from eval.report_page.run import main

if __name__ == "__main__":
    main(sys.argv[1:])
