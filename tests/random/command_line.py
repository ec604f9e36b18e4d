"""The command line that the random tests share."""
import argparse
import sys


def options_of(doc, count, cases="cases"):
    """The options, with the numbers of the cases to run as `numbers`. `count` is the default of --count, and `cases` its help."""
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("program")
    parser.add_argument("--count", type=int, default=count, help=cases)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--case", type=int, help="only this one, with its settings")
    options = parser.parse_args()
    options.numbers = range(options.count) if options.case is None else [options.case]
    return options


def run_cases(options, run, named=lambda number: ""):
    """Runs all cases and exits. run(number) returns sentences about what differs, or None for a case that is left out."""
    failed = left_out = 0
    for number in options.numbers:
        wrong = run(number)
        left_out += wrong is None
        if wrong:
            failed += 1
            print(f"case {number} of seed {options.seed}{named(number)}:", *wrong[:6], sep="\n  ", flush=True)
    print(f"{len(options.numbers)} cases, {failed} differ, {left_out} left out (more stages than layers)")
    sys.exit(failed > 0 or left_out == len(options.numbers))
