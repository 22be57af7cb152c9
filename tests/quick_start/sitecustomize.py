"""Read by every Python process that the suite starts: search for garbage less often.

SGLang's imports make millions of objects and no garbage among them; to look for it takes a fifth
of the time that a server needs to start, three times over, for it has three processes.
"""

import gc

gc.set_threshold(200_000, 10, 10)
