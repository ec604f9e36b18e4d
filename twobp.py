"""`import twobp` in the root of the repository, where Python would take the C++ sources in twobp/ for a package without a name in it. This file
imports the package that is installed or built elsewhere on the path, or says how to get it. It is not installed."""
import importlib.machinery
import importlib.util
import pathlib
import sys

_root = pathlib.Path(__file__).resolve().parent
_found = importlib.machinery.PathFinder.find_spec(__name__, [one for one in sys.path if pathlib.Path(one or ".").resolve() != _root])
if _found is None or _found.origin is None:
    raise ModuleNotFoundError("No module named 'twobp': it is not installed, and the folder twobp has only C++ sources. Run `pip install "
                              "--no-build-isolation .` (docs/python.md), or set PYTHONPATH=build/release/python after a build", name=__name__)
_package = importlib.util.module_from_spec(_found)
sys.modules[__name__] = _package
_found.loader.exec_module(_package)
