"""Debate and single-turn runs by the flags of the earlier script: translated to a recipe's keys (`recipes.flags`), said, and run.

python3 -u scripts/train.py --no-proxy --mode debate --env qa --dataset test -n 256 --num-groups 4 -s 10 --mock-judge
"""

from recipes.flags import run_train

if __name__ == "__main__":
    run_train()
