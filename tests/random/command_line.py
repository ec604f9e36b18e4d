"""The command line that the random tests share."""
import argparse


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
