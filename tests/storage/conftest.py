import sys
from pathlib import Path

# Test folders are not packages; this makes their helper modules importable.
sys.path.insert(0, str(Path(__file__).parent))
