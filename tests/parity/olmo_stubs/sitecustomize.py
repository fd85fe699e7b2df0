"""On PYTHONPATH: makes ai2-olmo importable without the packages that its checkpoint code imports but does not need.

Python runs a module of this name at its start, in the processes that OLMo spawns too. Each package below becomes an
empty module whose attributes are empty classes, unless TESSERA_REAL_PACKAGES names it, between commas.
"""
import importlib.abc
import importlib.machinery
import os
import pathlib
import sys
import types

STAND_INS = {"antlr4", "boto3", "botocore", "cached_path", "datasets", "google", "importlib_resources",
             "requests", "rich", "tokenizers", "transformers"}
STAND_INS -= set(os.environ.get("TESSERA_REAL_PACKAGES", "").split(","))


# What "from PACKAGE import *" gives.
ALL = {"antlr4": ["ATNDeserializer", "DFA", "Lexer", "LexerATNSimulator", "NoViableAltException", "Parser",
                  "ParserATNSimulator", "ParserRuleContext", "ParseTreeListener", "ParseTreeVisitor",
                  "PredictionContextCache", "RecognitionException", "TerminalNode", "Token", "TokenStream"]}


class Anything(tuple):
    """What an attribute of a stand-in class is: an empty tuple that can be called."""

    def __call__(self, *arguments, **named):
        return self

    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return Anything()


class Attributes(type):
    def __getattr__(cls, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return Anything()


def local_path(path, **_):
    """cached_path of a local file: the file itself."""
    if not pathlib.Path(path).is_file():
        raise FileNotFoundError(path)
    return pathlib.Path(path)


class StandIn(types.ModuleType):
    def __getattr__(self, name):
        if name == "__all__":
            return ALL.get(self.__name__, [])
        if name.startswith("__"):
            raise AttributeError(name)
        made = Attributes(name, (Exception,), {"__init__": lambda self, *arguments, **named: None,
                                               "__getattr__": lambda self, attribute: Anything()})
        setattr(self, name, made)
        return made


class Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in STAND_INS:
            return importlib.machinery.ModuleSpec(name, self, is_package=True)
        return None

    def create_module(self, spec):
        return StandIn(spec.name)

    def exec_module(self, module):
        if module.__name__ == "cached_path":
            module.cached_path = local_path


# First: what else is installed does not change a test.
sys.meta_path.insert(0, Finder())
