"""`weft bench`, by the name that the other benchmarks have.

python benchmarks/serve.py --users 1,16,64
python benchmarks/serve.py --help
"""

import sys

from weft.serving.cli.main import main

sys.argv.insert(1, "bench")
main()
