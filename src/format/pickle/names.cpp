#include "format/pickle/names.h"

#include <algorithm>
#include <array>

#include "base/text.h"

namespace tessera::pickle {
namespace {

// Modules whose functions and classes are refused as a whole, with everything below them.
constexpr auto kModules = std::to_array<std::string_view>({
    "_ctypes",
    "_pickle",
    "_posixsubprocess",
    "_thread",
    "aiohttp",
    "antigravity",
    "asyncio",
    "bdb",
    "cPickle",
    "cProfile",
    "cloudpickle",
    "code",
    "codeop",
    "commands",
    "ctypes",
    "dill",
    "distutils",
    "doctest",
    "ensurepip",
    "ftplib",
    "http",
    "httplib",
    "httplib2",
    "idlelib",
    "imaplib",
    "imp",
    "importlib",
    "jnius",
    "joblib",
    "lib2to3",
    "linecache",
    "marshal",
    "mmap",
    "multiprocessing",
    "nt",
    "os",
    "paramiko",
    "pdb",
    "pickle",
    "pickletools",
    "pip",
    "pkgutil",
    "poplib",
    "popen2",
    "posix",
    "profile",
    "pty",
    "pydoc",
    "requests",
    "runpy",
    "select",
    "setuptools",
    "shelve",
    "shutil",
    "signal",
    "site",
    "smtplib",
    "socket",
    "socketserver",
    "sqlite3",
    "ssl",
    "subprocess",
    "sys",
    "telnetlib",
    "tempfile",
    "test.support",
    "this",
    "threading",
    "timeit",
    "trace",
    "turtle",
    "urllib",
    "urllib2",
    "venv",
    "webbrowser",
    "xmlrpc",
    "zipimport",
    "torch.hub",
    "torch.utils.cpp_extension",
    "torch._inductor",
    "torch._dynamo",
    "torch.utils.collect_env",
    "torch.utils.bottleneck",
    "torch.distributed.elastic",
    "torch.distributed.run",
    "torch.distributed.launch",
    "numpy.f2py",
    "numpy.testing",
    "numpy.distutils",
});

struct Name {
  std::string_view module;
  std::string_view name;
};

constexpr auto kNames = std::to_array<Name>({
    {"io", "open"},
    {"io", "open_code"},
    {"io", "FileIO"},
    {"_io", "open"},
    {"_io", "open_code"},
    {"_io", "FileIO"},
    {"uuid", "_get_command_stdout"},
    {"builtins", "eval"},
    {"builtins", "exec"},
    {"builtins", "execfile"},
    {"builtins", "compile"},
    {"builtins", "open"},
    {"builtins", "file"},
    {"builtins", "__import__"},
    {"builtins", "apply"},
    {"builtins", "breakpoint"},
    {"builtins", "delattr"},
    {"builtins", "dir"},
    {"builtins", "exit"},
    {"builtins", "getattr"},
    {"builtins", "globals"},
    {"builtins", "hasattr"},
    {"builtins", "help"},
    {"builtins", "input"},
    {"builtins", "locals"},
    {"builtins", "memoryview"},
    {"builtins", "print"},
    {"builtins", "quit"},
    {"builtins", "raw_input"},
    {"builtins", "reload"},
    {"builtins", "setattr"},
    {"builtins", "super"},
    {"builtins", "vars"},
    {"builtins", "map"},
    {"builtins", "filter"},
    {"copyreg", "_reconstructor"},
    {"copyreg", "add_extension"},
    {"copyreg", "pickle"},
    {"functools", "partialmethod"},
    {"functools", "reduce"},
    {"functools", "singledispatch"},
    {"itertools", "starmap"},
    {"itertools", "accumulate"},
    {"operator", "attrgetter"},
    {"operator", "itemgetter"},
    {"operator", "methodcaller"},
    {"operator", "call"},
    {"_operator", "attrgetter"},
    {"_operator", "itemgetter"},
    {"_operator", "methodcaller"},
    {"_operator", "call"},
    {"types", "CodeType"},
    {"types", "FunctionType"},
    {"types", "LambdaType"},
    {"types", "MethodType"},
    {"torch", "load"},
    {"torch", "compile"},
    {"torch.serialization", "load"},
    {"torch.storage", "_load_from_bytes"},
    {"torch._utils", "_import_dotted_name"},
    {"torch.jit", "load"},
    {"torch.package", "PackageImporter"},
    {"torch._C", "_jit_eval"},
    {"numpy", "load"},
    {"numpy", "loadtxt"},
    {"numpy", "fromfile"},
    {"numpy", "memmap"},
    {"numpy.core.memmap", "memmap"},
    {"numpy._core.memmap", "memmap"},
    {"pandas", "read_pickle"},
    {"pandas.io.pickle", "read_pickle"},
});

constexpr auto kOfCompiler = std::to_array<Name>({
    {"torch._dynamo.eval_frame", "OptimizedModule"},
    {"torch._dynamo.eval_frame", "OptimizeContext"},
    {"torch._dynamo.convert_frame", "CatchErrorsWrapper"},
    {"torch._dynamo.convert_frame", "ConvertFrame"},
    {"torch._dynamo.convert_frame", "ConvertFrameAssert"},
    {"torch._dynamo.convert_frame", "ConvertFrameBox"},
    {"torch._dynamo.hooks", "Hooks"},
    {"torch._dynamo.repro.after_dynamo", "WrapBackendDebug"},
});

struct Member {
  Name owner;
  std::string_view name;
};

constexpr std::string_view kMetadata = "torch.distributed.checkpoint.metadata";
constexpr std::string_view kShardedMetadata = "torch.distributed._shard.sharded_tensor.metadata";

constexpr auto kMembers = std::to_array<Member>({
    {{kMetadata, "_MEM_FORMAT_ENCODING"}, "TORCH_CONTIGUOUS_FORMAT"},
    {{kMetadata, "_MEM_FORMAT_ENCODING"}, "TORCH_CHANNELS_LAST"},
    {{kMetadata, "_MEM_FORMAT_ENCODING"}, "TORCH_PRESERVE_FORMAT"},
    {{kShardedMetadata, "MEM_FORMAT_ENCODING"}, "TORCH_CONTIGUOUS_FORMAT"},
    {{kShardedMetadata, "MEM_FORMAT_ENCODING"}, "TORCH_CHANNELS_LAST"},
    {{kShardedMetadata, "MEM_FORMAT_ENCODING"}, "TORCH_PRESERVE_FORMAT"},
    {{"torch.distributed._shard.sharded_tensor.api", "ShardedTensor"}, "ProcessGroupState"},
});

constexpr bool is_below(std::string_view name, std::string_view module) {
  return name.starts_with(module) && (name.size() == module.size() || name[module.size()] == '.');
}

bool in_dangerous_module(std::string_view name) {
  return std::any_of(kModules.begin(), kModules.end(),
                     [name](std::string_view module) { return is_below(name, module); });
}

struct Rename {
  Name python2;
  Name python3;  // an empty name: all names of the module
};

constexpr auto kRenames = std::to_array<Rename>({
    {{"__builtin__", "xrange"}, {"builtins", "range"}},
    {{"__builtin__", "reduce"}, {"functools", "reduce"}},
    {{"__builtin__", "intern"}, {"sys", "intern"}},
    {{"__builtin__", "unichr"}, {"builtins", "chr"}},
    {{"__builtin__", "unicode"}, {"builtins", "str"}},
    {{"__builtin__", "long"}, {"builtins", "int"}},
    {{"itertools", "izip"}, {"builtins", "zip"}},
    {{"itertools", "imap"}, {"builtins", "map"}},
    {{"itertools", "ifilter"}, {"builtins", "filter"}},
    {{"itertools", "ifilterfalse"}, {"itertools", "filterfalse"}},
    {{"itertools", "izip_longest"}, {"itertools", "zip_longest"}},
    {{"UserDict", "IterableUserDict"}, {"collections", "UserDict"}},
    {{"UserList", "UserList"}, {"collections", "UserList"}},
    {{"UserString", "UserString"}, {"collections", "UserString"}},
    {{"__builtin__", ""}, {"builtins", ""}},
    {{"copy_reg", ""}, {"copyreg", ""}},
    {{"Queue", ""}, {"queue", ""}},
    {{"SocketServer", ""}, {"socketserver", ""}},
    {{"ConfigParser", ""}, {"configparser", ""}},
    {{"repr", ""}, {"reprlib", ""}},
    {{"thread", ""}, {"_thread", ""}},
    {{"urllib2", ""}, {"urllib.request", ""}},
    {{"htmlentitydefs", ""}, {"html.entities", ""}},
    {{"cPickle", ""}, {"pickle", ""}},
});

void rename(std::string& module, std::string& name, Name Rename::*from, Name Rename::*to) {
  const auto* row = std::ranges::find_if(
      kRenames,
      [&](const Name& known) {
        return known.module == module && (known.name.empty() || known.name == name);
      },
      from);
  if (row == kRenames.end()) return;
  module = (row->*to).module;
  if (!(row->*to).name.empty()) name = (row->*to).name;
}

bool is_dangerous_step(std::string_view step) {
  return step.starts_with("__") || is_one_of(step, "builtins", "f_globals", "gi_frame") ||
         in_dangerous_module(step);
}

}  // namespace

bool is_dangerous_attribute(std::string_view name) {
  while (!name.empty()) {
    const std::size_t dot = std::min(name.find('.'), name.size());
    if (is_dangerous_step(name.substr(0, dot))) return true;
    name.remove_prefix(std::min(dot + 1, name.size()));
  }
  return false;
}

bool is_dangerous(std::string_view module, std::string_view name) {
  if (in_dangerous_module(module)) return true;
  if (name.find('.') != std::string_view::npos && is_dangerous_attribute(name)) return true;
  const std::string_view first = name.substr(0, name.find('.'));
  return std::any_of(kNames.begin(), kNames.end(), [module, first](const Name& row) {
    return row.module == module && row.name == first;
  });
}

bool is_of_compiler(std::string_view module, std::string_view name) {
  return std::any_of(kOfCompiler.begin(), kOfCompiler.end(), [module, name](const Name& row) {
    return row.module == module && row.name == name;
  });
}

bool is_known_member(std::string_view module, std::string_view owner, std::string_view name) {
  return std::any_of(kMembers.begin(), kMembers.end(), [&](const Member& member) {
    return member.name == name && member.owner.name == owner && member.owner.module == module;
  });
}

void from_python2(std::string& module, std::string& name) {
  rename(module, name, &Rename::python2, &Rename::python3);
}

void to_python2(std::string& module, std::string& name) {
  rename(module, name, &Rename::python3, &Rename::python2);
}

}  // namespace tessera::pickle
