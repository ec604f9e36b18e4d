#!/usr/bin/env python3
"""Captures random modules around each pattern that capture rewrites, with one operator inserted at a random place, and compares their programs with autograd
at other weights and batches (patterns.py). Needs the Python package.

    PYTHONPATH=build/release/python tests/random/rewrites_test.py --count 2000
    ... --first 700                  go on from a case
    ... --case 17                    one of them again, with what it is
"""
import argparse
import sys
import warnings

import patterns
import torch


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=50)
    parser.add_argument("--first", type=int, default=0, help="the number of the first case")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--case", type=int, help="only this one")
    options = parser.parse_args()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    failed = 0
    for number in range(options.first, options.count) if options.case is None else [options.case]:
        what, wrong = patterns.run(options.seed, number)
        failed += bool(wrong)
        if wrong or options.case is not None:
            print(f"case {number} of seed {options.seed}: {what}", *wrong[:4], sep="\n  ", flush=True)
    print(f"{failed} of {options.count - options.first if options.case is None else 1} cases failed")
    sys.exit(failed > 0)


if __name__ == "__main__":
    main()
