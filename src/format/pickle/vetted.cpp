// Each row was read in the sources of its project: what importing the module, calling, making,
// BUILD (`__setstate__`, or attributes of the new object) and filling with items do with arguments
// that are data. CPython and these functions call attributes of what they get (`append`,
// `as_subclass`, `__setstate__` of an instance), so no function or class may stand in data: an
// attribute that is none cannot run anything. Whole modules, optimizers and schedulers of torch are
// left out for the same reason: their classes look at their own attributes for what to call.
#include "format/pickle/vetted.h"

#include <algorithm>
#include <array>
#include <cstdint>

#include "base/text.h"
#include "format/pickle/names.h"
#include "value/equality.h"

namespace tessera::pickle {
namespace {

using Kind = Value::Kind;

// Letters of the ways in which a name may be used beside being mentioned: c called, m made by
// __new__, s given a state, i given items. v: a value, which may stand anywhere.
struct Row {
  std::string_view module;
  std::string_view uses;
  std::string_view names;  // apart by blanks
};

constexpr auto kRows = std::to_array<Row>({
    // The standard library.
    {"_codecs", "c", "encode"},
    {"builtins", "c",
     "bool bytearray bytes complex dict float frozenset getattr int list range set slice str tuple "
     "type"},
    {"builtins", "v", "Ellipsis NotImplemented"},
    {"builtins", "m", "object"},
    {"argparse", "cms", "Namespace"},
    {"array", "c", "_array_reconstructor array"},
    {"collections", "cmsi", "Counter OrderedDict UserDict UserList defaultdict deque"},
    {"copyreg", "c", "__newobj__ _reconstructor"},
    {"datetime", "c", "date datetime time timedelta timezone"},
    {"decimal", "c", "Decimal"},
    {"fractions", "c", "Fraction"},
    {"pathlib", "c", "Path PosixPath PurePath PurePosixPath PureWindowsPath WindowsPath"},
    {"pathlib._local", "c", "Path PosixPath PurePath PurePosixPath PureWindowsPath WindowsPath"},
    {"types", "cms", "SimpleNamespace"},
    {"uuid", "ms", "UUID"},
    {"uuid", "c", "SafeUUID"},

    // numpy, whose private modules have had two names.
    {"numpy", "cs", "dtype"},
    {"numpy", "", "ndarray"},
    {"numpy", "",
     "bool_ float16 float32 float64 int16 int32 int64 int8 uint16 uint32 uint64 uint8"},
    {"numpy.core.multiarray", "cs", "_reconstruct"},
    {"numpy._core.multiarray", "cs", "_reconstruct"},
    {"numpy.core.multiarray", "c", "scalar"},
    {"numpy._core.multiarray", "c", "scalar"},
    {"numpy.core.numeric", "c", "_frombuffer"},
    {"numpy._core.numeric", "c", "_frombuffer"},
    {"numpy.dtypes", "c",
     "BoolDType BytesDType Complex128DType Complex64DType Float16DType Float32DType Float64DType "
     "Int16DType Int32DType Int64DType Int8DType ObjectDType StrDType UInt16DType UInt32DType "
     "UInt64DType UInt8DType"},

    // torch: tensors and what stands in their state.
    {"torch", "cm", "Size"},
    {"torch", "c", "device"},
    {"torch", "", "Tensor"},
    {"torch", "v",
     "channels_last channels_last_3d contiguous_format per_channel_affine "
     "per_channel_symmetric per_tensor_affine per_tensor_symmetric preserve_format qint32 qint8 "
     "quint2x4 quint4x2 quint8 sparse_bsc sparse_bsr sparse_coo sparse_csc sparse_csr strided"},
    {"torch._tensor", "c", "_rebuild_from_type_v2"},
    {"torch._utils", "c",
     "_rebuild_device_tensor_from_numpy _rebuild_meta_tensor_no_storage _rebuild_nested_tensor "
     "_rebuild_parameter "
     "_rebuild_parameter_with_state _rebuild_qtensor _rebuild_sparse_tensor _rebuild_tensor "
     "_rebuild_tensor_v2 _rebuild_tensor_v3 _rebuild_wrapper_subclass"},
    {"torch.jit._pickle", "c",
     "build_boollist build_doublelist build_intlist build_tensor_from_id build_tensorlist "
     "restore_type_tag"},
    {"torch.nn.parameter", "", "Buffer Parameter"},
    {"torch.serialization", "c", "_get_layout"},
    {"torch.storage", "c", "_load_from_bytes"},
    {"torch.torch_version", "cm", "TorchVersion"},

    // torch.distributed.
    {"torch.distributed._mesh_layout", "ms", "_FlatLayout _MeshLayout"},
    {"torch.distributed._shard.checkpoint.filesystem", "cms", "_StorageInfo"},
    {"torch.distributed._shard.checkpoint.metadata", "cms",
     "BytesStorageMetadata ChunkStorageMetadata Metadata MetadataIndex TensorStorageMetadata"},
    {"torch.distributed._shard.metadata", "ms", "ShardMetadata"},
    {"torch.distributed._shard.sharded_tensor.api", "ms",
     "ShardedTensor ShardedTensor.ProcessGroupState"},
    {"torch.distributed._shard.sharded_tensor.metadata", "cms",
     "MEM_FORMAT_ENCODING ShardedTensorMetadata TensorProperties"},
    {"torch.distributed._shard.sharded_tensor.metadata", "v",
     "MEM_FORMAT_ENCODING.TORCH_CHANNELS_LAST MEM_FORMAT_ENCODING.TORCH_CONTIGUOUS_FORMAT "
     "MEM_FORMAT_ENCODING.TORCH_PRESERVE_FORMAT"},
    {"torch.distributed._shard.sharded_tensor.shard", "ms", "Shard"},
    {"torch.distributed._shard.sharding_spec.api", "ms", "EnumerableShardingSpec"},
    {"torch.distributed._shard.sharding_spec.chunk_sharding_spec", "ms", "ChunkShardingSpec"},
    {"torch.distributed.checkpoint.filesystem", "cms", "_StorageInfo"},
    {"olmo_core.distributed.checkpoint.filesystem", "cms", "_StorageInfo"},
    {"torch.distributed.checkpoint.metadata", "cms",
     "BytesStorageMetadata ChunkStorageMetadata Metadata MetadataIndex StorageMeta "
     "TensorProperties TensorStorageMetadata _MEM_FORMAT_ENCODING"},
    {"torch.distributed.checkpoint.metadata", "v",
     "TORCH_CHANNELS_LAST TORCH_CONTIGUOUS_FORMAT TORCH_PRESERVE_FORMAT "
     "_MEM_FORMAT_ENCODING.TORCH_CHANNELS_LAST _MEM_FORMAT_ENCODING.TORCH_CONTIGUOUS_FORMAT "
     "_MEM_FORMAT_ENCODING.TORCH_PRESERVE_FORMAT"},
    {"torch.distributed.checkpoint.planner", "cms",
     "SavePlan TensorWriteData WriteItem WriteItemType"},
    {"torch.distributed.device_mesh", "ms", "DeviceMesh"},
    {"torch.distributed.fsdp._flat_param", "cms", "FlatParamShardMetadata _ShardParamInfo"},
    {"torch.distributed.fsdp.flat_param", "cms", "FlatParamShardMetadata _ShardParamInfo"},
    {"torch.distributed.fsdp.api", "c", "BackwardPrefetch ShardingStrategy StateDictType"},
    {"torch.distributed.remote_device", "ms", "_remote_device"},
    {"torch.distributed.tensor", "", "DTensor"},
    {"torch.distributed._tensor.api", "", "DTensor"},
    {"torch.distributed.tensor._dtensor_spec", "cms", "DTensorSpec ShardOrderEntry TensorMeta"},
    {"torch.distributed._tensor.placement_types", "cms",
     "DTensorSpec Replicate Shard TensorMeta _Partial"},
    {"torch.distributed.tensor.placement_types", "cms", "Partial Replicate Shard _StridedShard"},

    // What trainers leave in their checkpoints.
    {"accelerate.state", "ms", "PartialState"},
    {"accelerate.utils.dataclasses", "c", "DistributedType"},
    {"deepspeed.runtime.fp16.loss_scaler", "ms", "DynamicLossScaler LossScaler"},
    {"deepspeed.runtime.zero.config", "c", "ZeroStageEnum"},
    {"deepspeed.utils.tensor_fragment", "cms", "fragment_address"},
    {"transformers.trainer_pt_utils", "ms", "AcceleratorConfig"},
    {"transformers.trainer_utils", "c",
     "FSDPOption HubStrategy IntervalStrategy SaveStrategy SchedulerType"},
    {"transformers.training_args", "c", "OptimizerNames"},
    {"transformers.training_args", "ms", "TrainingArguments"},
});

struct Named {
  std::uint8_t row = 0;
  std::string_view name;
};

constexpr std::size_t kBuckets = 256;
constexpr std::size_t bucket_of(std::string_view module, std::string_view name) {
  return (module.size() * 37 + name.size()) % kBuckets;
}

// Calls `visit` for each name, in the order of the rows.
template <typename Visit>
constexpr void for_each_name(Visit visit) {
  for (std::size_t row = 0; row < kRows.size(); ++row) {
    for (std::string_view rest = kRows[row].names; !rest.empty();) {
      const std::size_t end = std::min(rest.find(' '), rest.size());
      visit(Named{static_cast<std::uint8_t>(row), rest.substr(0, end)});
      rest.remove_prefix(std::min(end + 1, rest.size()));
    }
  }
}
constexpr std::size_t kNameCount = [] {
  std::size_t names = 0;
  for_each_name([&names](const Named&) { ++names; });
  return names;
}();

// The names by the lengths of module and name: a pickle asks for each name that it uses, and few
// have the same.
struct Table {
  std::array<Named, kNameCount> names;
  std::array<std::uint16_t, kBuckets + 1> begins{};  // in `names`, of each bucket
};
constexpr Table kTable = [] {
  Table table;
  std::array<std::uint16_t, kBuckets> ends{};
  for_each_name([&](const Named& one) { ++ends[bucket_of(kRows[one.row].module, one.name)]; });
  for (std::size_t bucket = 0; bucket < kBuckets; ++bucket) {
    table.begins[bucket + 1] = static_cast<std::uint16_t>(table.begins[bucket] + ends[bucket]);
    ends[bucket] = table.begins[bucket];
  }
  for_each_name([&](const Named& one) {
    table.names[ends[bucket_of(kRows[one.row].module, one.name)]++] = one;
  });
  return table;
}();
static_assert(kRows.size() < 256);

const Row* find(std::string_view module, std::string_view name) {
  const std::size_t bucket = bucket_of(module, name);
  for (std::size_t i = kTable.begins[bucket]; i < kTable.begins[bucket + 1]; ++i) {
    const Named& one = kTable.names[i];
    if (one.name == name && kRows[one.row].module == module) return &kRows[one.row];
  }
  return nullptr;
}

const Row* find(const Value& value) {
  return value.is(Kind::global) ? find(value.global_module(), value.global_name()) : nullptr;
}

// A function or class, which could be called.
bool is_callable(const Value& value) {
  const Row* row = find(value);
  return row != nullptr && row->uses != "v";
}

// Whether one stands somewhere in these values. What a call gave is none: the call was judged.
// Larger ones than what is looked into count as if.
bool holds_callable(const Value& value, int& left) {
  if (--left < 0) return true;
  if (is_one_of(value.kind(), Kind::list, Kind::tuple, Kind::set))
    return std::ranges::any_of(value.items(),
                               [&left](const Value& item) { return holds_callable(item, left); });
  if (!value.is(Kind::dict)) return is_callable(value);
  return std::ranges::any_of(value.pairs(), [&left](const auto& pair) {
    return holds_callable(pair.first, left) || holds_callable(pair.second, left);
  });
}

// Arguments from `first` on.
bool are_data(const Value& arguments, std::size_t first) {
  int left = 10'000;
  const auto& given = arguments.items();
  return std::none_of(given.begin() + static_cast<std::ptrdiff_t>(std::min(first, given.size())),
                      given.end(), [&left](const Value& v) { return holds_callable(v, left); });
}

// A class that may be made: data about which nothing is known but its name.
bool is_made_class(const Value& value) {
  const Row* row = find(value);
  return row != nullptr && row->uses.find('m') != std::string_view::npos;
}

bool is_rebuilder(const Value& value) {
  return value.is(Kind::global) && value.global_module() == "torch._utils" &&
         find(value) != nullptr;
}

bool is_tensor_class(const Value& value) {
  return is_global(value, "torch", "Tensor") ||
         is_global(value, "torch.nn.parameter", "Parameter") ||
         is_global(value, "torch.nn.parameter", "Buffer") ||
         is_global(value, "torch.distributed.tensor", "DTensor") ||
         is_global(value, "torch.distributed._tensor.api", "DTensor") ||
         is_global(value, "torch.distributed._shard.sharded_tensor.api", "ShardedTensor");
}

// A default factory is called later, with nothing.
bool is_factory(const Value& value) {
  constexpr std::array<std::string_view, 7> kClasses{"bool", "dict", "float", "int",
                                                     "list", "set",  "str"};
  if (value.is(Kind::none)) return true;
  return value.is(Kind::global) && value.global_module() == "builtins" &&
         std::ranges::find(kClasses, value.global_name()) != kClasses.end();
}

// cls.__new__(cls, base's state): base is object, or the built-in class from which cls derives.
bool are_of_reconstructor(const Value& arguments) {
  const auto& given = arguments.items();
  return given.size() == 3 && is_made_class(given[0]) && given[1].is(Kind::global) &&
         given[1].global_module() == "builtins" &&
         is_one_of(given[1].global_name(), "object", "dict", "list", "set", "tuple", "int",
                   "str") &&
         are_data(arguments, 2);
}

// Attributes: names that are not Python's own.
bool are_attributes(const Value& state) {
  if (state.is(Kind::none)) return true;
  if (!state.is(Kind::dict)) return false;
  return std::ranges::all_of(state.pairs(), [](const auto& pair) {
    return pair.first.is(Kind::string) && !pair.first.as_string().starts_with("__");
  });
}

// What BUILD gets: attributes, or those and the ones of slots; anything else is an argument of the
// class's own `__setstate__`.
bool is_state(const Value& state) {
  if (state.is(Kind::dict)) return are_attributes(state);
  if (!state.is(Kind::tuple) || state.size() != 2) return true;
  return std::ranges::all_of(state.items(), are_attributes);
}

bool is_rebuilt_by_type(const Value& arguments) {
  const auto& given = arguments.items();
  if (given.size() != 4 || !is_rebuilder(given[0]) || !is_tensor_class(given[1]) ||
      !given[2].is(Kind::tuple) || !is_state(given[3]) || !are_data(arguments, 3))
    return false;
  const bool wrapped = given[0].global_name() == "_rebuild_wrapper_subclass";
  if (wrapped && (given[2].size() == 0 || !is_tensor_class(given[2].items()[0]))) return false;
  return are_data(given[2], wrapped ? 1 : 0);
}

// 'f4', '<U5', 'O8': without fields, and its code.
std::string_view code_of_dtype(const Value& arguments) {
  if (arguments.size() == 0 || !arguments.items()[0].is(Kind::string)) return {};
  std::string_view text = arguments.items()[0].as_string();
  if (!text.empty() && is_one_of(text[0], '<', '>', '|', '=')) text.remove_prefix(1);
  constexpr std::string_view kCodes = "?biufcmMSUVO";
  const bool plain = !text.empty() && kCodes.find(text[0]) != std::string_view::npos &&
                     text.find_first_not_of("0123456789", 1) == std::string_view::npos;
  return plain ? text.substr(0, 1) : std::string_view();
}

// The state of a dtype says what its elements are once more. Flags of another kind make numpy take
// raw bytes for objects.
bool is_state_of_dtype(const Value& made_with, const Value& state) {
  const std::string_view code = code_of_dtype(made_with);
  if (code.empty() || !state.is(Kind::tuple) || !is_one_of(state.size(), 8U, 9U)) return false;
  const auto& given = state.items();
  for (const std::size_t part : {2, 3, 4})
    if (!given[part].is(Kind::none)) return false;
  const std::int64_t flags = code == "O" ? 63 : code == "U" ? 8 : 0;
  return given[7] == Value(flags);
}

// The functions whose arguments decide.
struct Decided {
  std::string_view module;
  std::string_view name;
  bool (*is_data)(const Value& arguments);
};

bool is_array(const Value& arguments) {
  return arguments.size() > 0 && is_global(arguments.items()[0], "numpy", "ndarray") &&
         are_data(arguments, 1);
}

constexpr auto kDecided = std::to_array<Decided>({
    {"_codecs", "encode", is_latin1_text},
    {"array", "_array_reconstructor",
     [](const Value& given) {
       return given.size() > 0 && is_global(given.items()[0], "array", "array") &&
              are_data(given, 1);
     }},
    {"builtins", "type",
     [](const Value& given) {
       return given.size() == 1 &&
              (given.items()[0].is(Kind::none) || find(given.items()[0]) != nullptr) &&
              are_data(given, 0);
     }},
    {"builtins", "getattr",
     [](const Value& given) {
       if (given.size() != 2) return false;
       const Value& owner = given.items()[0];
       const Value& name = given.items()[1];
       return owner.is(Kind::global) && name.is(Kind::string) &&
              is_known_member(owner.global_module(), owner.global_name(), name.as_string());
     }},
    {"collections", "defaultdict",
     [](const Value& given) {
       return given.size() == 0 || (is_factory(given.items()[0]) && are_data(given, 1));
     }},
    {"copyreg", "_reconstructor", are_of_reconstructor},
    {"copyreg", "__newobj__",
     [](const Value& given) {
       return given.size() > 0 && is_made_class(given.items()[0]) && are_data(given, 1);
     }},
    {"numpy", "dtype",
     [](const Value& given) { return !code_of_dtype(given).empty() && are_data(given, 0); }},
    {"numpy.core.multiarray", "_reconstruct", is_array},
    {"numpy._core.multiarray", "_reconstruct", is_array},
    {"torch.storage", "_load_from_bytes",
     [](const Value& given) { return given.size() == 1 && given.items()[0].is(Kind::bytes); }},
    {"torch._tensor", "_rebuild_from_type_v2", is_rebuilt_by_type},
    {"torch._utils", "_rebuild_parameter_with_state",
     [](const Value& given) {
       return given.size() == 4 && is_state(given.items()[3]) && are_data(given, 0);
     }},
    {"torch._utils", "_rebuild_wrapper_subclass",
     [](const Value& given) {
       return given.size() > 0 && is_tensor_class(given.items()[0]) && are_data(given, 1);
     }},
});

char letter_of(Watch::Use use) {
  constexpr std::array<char, 5> kLetters{'\0', 'c', 'm', 's', 'i'};
  return kLetters[static_cast<std::size_t>(use)];
}

}  // namespace

bool is_vetted(std::string_view module, std::string_view name) {
  return find(module, name) != nullptr;
}

bool is_vetted_value(std::string_view module, std::string_view name) {
  const Row* row = find(module, name);
  return row != nullptr && row->uses == "v";
}

bool is_latin1_text(const Value& arguments) {
  return arguments.size() == 2 && arguments.items()[0].is(Kind::string) &&
         (is_text(arguments.items()[1], "latin1") || is_text(arguments.items()[1], "latin-1"));
}

bool is_vetted_use(std::string_view module, std::string_view name, Watch::Use use,
                   const Value& arguments, bool callables, const Value& made_with) {
  const Row* row = find(module, name);
  if (row == nullptr) return false;
  if (use == Watch::Use::named) return true;
  if (row->uses.find(letter_of(use)) == std::string_view::npos) return false;
  if (use == Watch::Use::given_items) return !callables;
  if (use == Watch::Use::given_state) {
    const bool dtype = module == "numpy" && name == "dtype";
    return !callables && (dtype ? is_state_of_dtype(made_with, arguments) : is_state(arguments));
  }
  if (!arguments.is(Kind::tuple)) return false;
  const auto* decided = std::ranges::find_if(kDecided, [&](const Decided& function) {
    return function.module == module && function.name == name;
  });
  return decided == kDecided.end() ? !callables : decided->is_data(arguments);
}

bool takes_pickle(std::string_view module, std::string_view name) {
  return (module == "torch.storage" && name == "_load_from_bytes") ||
         (is_one_of(name, "loads", "_loads") &&
          is_one_of(module, "pickle", "_pickle", "cPickle", "dill", "dill._dill", "cloudpickle",
                    "cloudpickle.cloudpickle"));
}

}  // namespace tessera::pickle
