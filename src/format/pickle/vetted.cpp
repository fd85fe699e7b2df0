// Each row was read in the sources of its project: what importing the module, calling, creating,
// BUILD (`__setstate__`, or attributes of the new object) and filling with items do with arguments
// that are data. A class whose state may hold functions (hooks of modules and optimizers) counts
// where these can only be other vetted names. What gives back an argument as it is may be called
// and nothing more: its result could be a class, whose attributes a BUILD would set.
#include "format/pickle/vetted.h"

#include <algorithm>
#include <array>

#include "base/one_of.h"
#include "format/pickle/names.h"
#include "value/match.h"

namespace tessera::pickle {
namespace {

using Kind = Value::Kind;

// Letters of the ways in which a name may be used beside being mentioned: c called, m made by
// __new__, s given a state, i given items.
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
    {"builtins", "", "Ellipsis NotImplemented"},
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
    {"torch", "",
     "Tensor channels_last channels_last_3d contiguous_format per_channel_affine "
     "per_channel_symmetric per_tensor_affine per_tensor_symmetric preserve_format qint32 qint8 "
     "quint2x4 quint4x2 quint8 sparse_bsc sparse_bsr sparse_coo sparse_csc sparse_csr strided"},
    {"torch._tensor", "c", "_rebuild_from_type_v2"},
    {"torch._utils", "cs",
     "_rebuild_device_tensor_from_cpu_tensor _rebuild_device_tensor_from_numpy "
     "_rebuild_meta_tensor_no_storage _rebuild_nested_tensor _rebuild_parameter "
     "_rebuild_parameter_with_state _rebuild_qtensor _rebuild_sparse_tensor _rebuild_tensor "
     "_rebuild_tensor_v2 _rebuild_tensor_v3 _rebuild_wrapper_subclass _rebuild_xla_tensor"},
    {"torch.jit._pickle", "c",
     "build_boollist build_doublelist build_intlist build_tensor_from_id build_tensorlist "
     "restore_type_tag"},
    {"torch.nn.parameter", "", "Buffer Parameter"},
    {"torch.serialization", "c", "_get_layout"},
    {"torch.storage", "c", "_load_from_bytes"},
    {"torch.torch_version", "cms", "TorchVersion"},

    // torch.distributed.
    {"torch.distributed._mesh_layout", "ms", "_FlatLayout _MeshLayout"},
    {"torch.distributed._shard.metadata", "ms", "ShardMetadata"},
    {"torch.distributed._shard.sharded_tensor.api", "ms",
     "ShardedTensor ShardedTensor.ProcessGroupState"},
    {"torch.distributed._shard.sharded_tensor.metadata", "cms",
     "MEM_FORMAT_ENCODING ShardedTensorMetadata TensorProperties"},
    {"torch.distributed._shard.sharded_tensor.metadata", "",
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
    {"torch.distributed.checkpoint.metadata", "",
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

    // Whole modules, optimizers and schedulers: attributes of a new object.
    {"torch.nn.modules.activation", "ms",
     "CELU ELU GELU GLU Hardshrink Hardsigmoid Hardswish Hardtanh LeakyReLU LogSigmoid LogSoftmax "
     "Mish MultiheadAttention PReLU RReLU ReLU ReLU6 SELU SiLU Sigmoid Softmax Softmax2d Softmin "
     "Softplus Softshrink Softsign Tanh Tanhshrink Threshold"},
    {"torch.nn.modules.batchnorm", "ms", "BatchNorm1d BatchNorm2d BatchNorm3d SyncBatchNorm"},
    {"torch.nn.modules.container", "ms",
     "ModuleDict ModuleList ParameterDict ParameterList Sequential"},
    {"torch.nn.modules.conv", "ms",
     "Conv1d Conv2d Conv3d ConvTranspose1d ConvTranspose2d ConvTranspose3d"},
    {"torch.nn.modules.distance", "ms", "CosineSimilarity PairwiseDistance"},
    {"torch.nn.modules.dropout", "ms",
     "AlphaDropout Dropout Dropout1d Dropout2d Dropout3d FeatureAlphaDropout"},
    {"torch.nn.modules.flatten", "ms", "Flatten Unflatten"},
    {"torch.nn.modules.fold", "ms", "Fold Unfold"},
    {"torch.nn.modules.instancenorm", "ms", "InstanceNorm1d InstanceNorm2d InstanceNorm3d"},
    {"torch.nn.modules.linear", "ms", "Bilinear Identity Linear NonDynamicallyQuantizableLinear"},
    {"torch.nn.modules.loss", "ms",
     "BCELoss BCEWithLogitsLoss CTCLoss CosineEmbeddingLoss CrossEntropyLoss GaussianNLLLoss "
     "HingeEmbeddingLoss HuberLoss KLDivLoss L1Loss MSELoss MarginRankingLoss MultiLabelMarginLoss "
     "MultiLabelSoftMarginLoss MultiMarginLoss NLLLoss PoissonNLLLoss SmoothL1Loss SoftMarginLoss "
     "TripletMarginLoss"},
    {"torch.nn.modules.module", "ms", "Module"},
    {"torch.nn.modules.normalization", "ms",
     "CrossMapLRN2d GroupNorm LayerNorm LocalResponseNorm RMSNorm"},
    {"torch.nn.modules.padding", "ms",
     "ConstantPad1d ConstantPad2d ConstantPad3d ReflectionPad1d ReflectionPad2d ReflectionPad3d "
     "ReplicationPad1d ReplicationPad2d ReplicationPad3d ZeroPad1d ZeroPad2d ZeroPad3d"},
    {"torch.nn.modules.pixelshuffle", "ms", "PixelShuffle PixelUnshuffle"},
    {"torch.nn.modules.pooling", "ms",
     "AdaptiveAvgPool1d AdaptiveAvgPool2d AdaptiveAvgPool3d AdaptiveMaxPool1d AdaptiveMaxPool2d "
     "AdaptiveMaxPool3d AvgPool1d AvgPool2d AvgPool3d LPPool1d LPPool2d MaxPool1d MaxPool2d "
     "MaxPool3d MaxUnpool1d MaxUnpool2d MaxUnpool3d"},
    {"torch.nn.modules.rnn", "ms", "GRU GRUCell LSTM LSTMCell RNN RNNCell"},
    {"torch.nn.modules.sparse", "ms", "Embedding EmbeddingBag"},
    {"torch.nn.modules.transformer", "ms",
     "Transformer TransformerDecoder TransformerDecoderLayer TransformerEncoder "
     "TransformerEncoderLayer"},
    {"torch.nn.modules.upsampling", "ms", "Upsample UpsamplingBilinear2d UpsamplingNearest2d"},
    {"torch.nn.functional", "", "gelu leaky_relu relu silu tanh"},
    {"torch._C._nn", "", "gelu silu"},
    {"torch.optim.adadelta", "ms", "Adadelta"},
    {"torch.optim.adagrad", "ms", "Adagrad"},
    {"torch.optim.adam", "ms", "Adam"},
    {"torch.optim.adamax", "ms", "Adamax"},
    {"torch.optim.adamw", "ms", "AdamW"},
    {"torch.optim.lr_scheduler", "ms",
     "ConstantLR CosineAnnealingLR CosineAnnealingWarmRestarts ExponentialLR LinearLR MultiStepLR "
     "PolynomialLR ReduceLROnPlateau SequentialLR StepLR"},
    {"torch.optim.nadam", "ms", "NAdam"},
    {"torch.optim.radam", "ms", "RAdam"},
    {"torch.optim.rmsprop", "ms", "RMSprop"},
    {"torch.optim.sgd", "ms", "SGD"},

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

bool has_name(std::string_view names, std::string_view name) {
  for (std::size_t at = names.find(name); at != std::string_view::npos;
       at = names.find(name, at + 1)) {
    const std::size_t end = at + name.size();
    if ((at == 0 || names[at - 1] == ' ') && (end == names.size() || names[end] == ' '))
      return true;
  }
  return false;
}

const Row* find(std::string_view module, std::string_view name) {
  if (name.empty() || name.find(' ') != std::string_view::npos) return nullptr;
  const auto* row = std::ranges::find_if(kRows, [&](const Row& known) {
    return known.module == module && has_name(known.names, name);
  });
  return row == kRows.end() ? nullptr : row;
}

bool is_latin1_text(const Value& arguments) {
  return arguments.size() == 2 && arguments.items()[0].is(Kind::string) &&
         (is_text(arguments.items()[1], "latin1") || is_text(arguments.items()[1], "latin-1"));
}

// A class that may be made: data about which nothing is known but its name.
bool is_made_class(const Value& value) {
  if (!value.is(Kind::global)) return false;
  const Row* row = find(value.global_module(), value.global_name());
  return row != nullptr && row->uses.find('m') != std::string_view::npos;
}

bool is_rebuilder(const Value& value) {
  return value.is(Kind::global) && value.global_module() == "torch._utils" &&
         find("torch._utils", value.global_name()) != nullptr;
}

// A default factory is called later, with nothing.
bool is_factory(const Value& value) {
  if (value.is(Kind::none)) return true;
  if (!value.is(Kind::global)) return false;
  const Row* row = find(value.global_module(), value.global_name());
  return row != nullptr && row->uses.starts_with('c');
}

// cls.__new__(cls, base's state): base is object, or the built-in class from which cls derives.
bool are_of_reconstructor(const Value::List& given) {
  return given.size() == 3 && is_made_class(given[0]) && given[1].is(Kind::global) &&
         given[1].global_module() == "builtins" &&
         is_one_of(given[1].global_name(), "object", "dict", "list", "set", "tuple", "int", "str");
}

// The functions whose arguments decide.
struct Decided {
  std::string_view module;
  std::string_view name;
  bool (*is_data)(const Value& arguments);
};

constexpr auto kDecided = std::to_array<Decided>({
    {"_codecs", "encode", is_latin1_text},
    {"builtins", "type", [](const Value& given) { return given.size() == 1; }},
    {"builtins", "getattr",
     [](const Value& given) {
       if (given.size() != 2) return false;
       const Value& owner = given.items()[0];
       const Value& name = given.items()[1];
       return owner.is(Kind::global) && name.is(Kind::string) &&
              is_known_member(owner.global_module(), owner.global_name(), name.as_string());
     }},
    {"collections", "defaultdict",
     [](const Value& given) { return given.size() == 0 || is_factory(given.items()[0]); }},
    {"copyreg", "_reconstructor",
     [](const Value& given) { return are_of_reconstructor(given.items()); }},
    {"copyreg", "__newobj__",
     [](const Value& given) { return given.size() > 0 && is_made_class(given.items()[0]); }},
    {"torch.storage", "_load_from_bytes",
     [](const Value& given) { return given.size() == 1 && given.items()[0].is(Kind::bytes); }},
    {"torch._tensor", "_rebuild_from_type_v2",
     [](const Value& given) { return given.size() == 4 && is_rebuilder(given.items()[0]); }},
});

char letter_of(Watch::Use use) {
  constexpr std::array<char, 5> kLetters{'\0', 'c', 'm', 's', 'i'};
  return kLetters[static_cast<std::size_t>(use)];
}

}  // namespace

bool is_vetted(std::string_view module, std::string_view name) {
  return find(module, name) != nullptr;
}

bool is_vetted_use(std::string_view module, std::string_view name, Watch::Use use,
                   const Value& arguments) {
  const Row* row = find(module, name);
  if (row == nullptr) return false;
  if (use == Watch::Use::named) return true;
  if (row->uses.find(letter_of(use)) == std::string_view::npos) return false;
  if (!is_one_of(use, Watch::Use::called, Watch::Use::made)) return true;
  if (!arguments.is(Kind::tuple)) return false;
  const auto* decided = std::ranges::find_if(kDecided, [&](const Decided& function) {
    return function.module == module && function.name == name;
  });
  return decided == kDecided.end() || decided->is_data(arguments);
}

bool takes_pickle(std::string_view module, std::string_view name) {
  return (module == "torch.storage" && name == "_load_from_bytes") ||
         (is_one_of(name, "loads", "_loads") &&
          is_one_of(module, "pickle", "_pickle", "cPickle", "dill", "dill._dill", "cloudpickle",
                    "cloudpickle.cloudpickle"));
}

}  // namespace tessera::pickle
