"""How much memory a piece of code takes, in a process of its own."""

import subprocess
import sys
from pathlib import Path

_PEAK = "import resource; peak = lambda: resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10\n"


def extra(before: str, code: str) -> int:
    """Bytes by which the second piece of code raises the peak that the first left."""
    code = f"{_PEAK}{before}\nstart = peak()\n{code}\nprint(peak() - start)"
    here = Path(__file__).parent.parent
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=here)
    return int(done.stdout)
