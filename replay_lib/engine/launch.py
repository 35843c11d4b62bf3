"""torchrun that ends with the process which started it, however that ends (Linux).

python -m replay_lib.engine.launch ARGUMENTS_OF_TORCHRUN
"""

from __future__ import annotations

import sys

from replay_lib.engine.channel import die_with_parent

if __name__ == "__main__":
    die_with_parent()
    from torch.distributed.run import main

    main(sys.argv[1:])
