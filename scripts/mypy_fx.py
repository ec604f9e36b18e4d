"""A plugin for mypy: what a node of torch.fx calls, and with which arguments, has the type Any. fx declares one union of all that any
operator may take, so that code that knows the operator would have to narrow every argument again."""

from mypy.plugin import Plugin
from mypy.types import AnyType, TypeOfAny

ANY = {"torch.fx.node.Node." + name for name in ("args", "kwargs", "target")}


class Fx(Plugin):
    def get_attribute_hook(self, fullname):
        return (lambda context: AnyType(TypeOfAny.explicit)) if fullname in ANY else None


def plugin(version):
    return Fx
