// DeepSpeed's checkpoints (docs/formats/deepspeed.md): what DeepSpeed itself wrote, against what
// its own zero_to_fp32 reads, and what is wrong with damaged ones.
#include <filesystem>
#include <functional>
#include <string>
#include <vector>

#include <gmock/gmock.h>

#include "checkpoint/test_support.h"

namespace tessera {
namespace {

namespace fs = std::filesystem;
using namespace testing_support;  // NOLINT(google-build-using-namespace)
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;

const std::string kCases = kGolden + "deepspeed/";
constexpr const char* kCut[] = {"zero1", "zero2_groups", "zero2_tiny", "zero3", "zero3_groups"};

TEST(DeepSpeed, AllValuesAreWhatItsOwnToolReads) {
  for (const std::string name : kCut) {
    const Checkpoint expected = Checkpoint::open(kCases + name + ".safetensors");
    for (const char* place : {"", "/global_step2"}) {
      const Checkpoint opened = Checkpoint::open(kCases + name + place);
      EXPECT_EQ(opened.kind, CheckpointKind::deepspeed);
      std::vector<std::string> names = expected.names();
      EXPECT_THAT(diff(expected, opened.only(names)), IsEmpty()) << name << place;
      EXPECT_THAT(verify(kCases + name + place).findings, IsEmpty()) << name;
    }
  }
}

TEST(DeepSpeed, HasGroupsWithNamesAndTheTrainersState) {
  const Value tree = Checkpoint::open(kCases + "zero2_groups").load();
  const Value& groups = tree.at("optim").at("param_groups");
  ASSERT_EQ(groups.size(), 2U);
  EXPECT_EQ(groups.at(0).at("params"), Value::list({"emb.weight", "l1.weight", "l2.weight"}));
  EXPECT_EQ(groups.at(1).at("weight_decay").as_real(), 0.0);
  EXPECT_EQ(tree.at("train").at("note").as_string(), "x");
  EXPECT_EQ(tree.at("train").at("global_steps").as_int(), 2);
  EXPECT_EQ(tree.at("train").find("module"), nullptr);
  EXPECT_EQ(Checkpoint::open(kCases + "zero2_groups").files.size(), 5U);  // `latest`, too
  // Two names of one parameter.
  EXPECT_EQ(tree.at("model").at("head.weight"), tree.at("model").at("emb.weight"));
}

TEST(DeepSpeed, WithoutZeroItIsTheModuleAsItIs) {
  const Value tree = Checkpoint::open(kCases + "zero0").load();
  EXPECT_EQ(tree.at("model").at("l1.weight").as_tensor().shape, (Shape{13, 8}));
  EXPECT_EQ(tree.at("optim").at("state").size(), 8U);
}

TEST(DeepSpeed, ConvertsToOtherKinds) {
  for (const std::string name : kCut) {
    for (const auto kind :
         {CheckpointKind::dcp, CheckpointKind::torch_file, CheckpointKind::safetensors}) {
      ConvertOptions options;
      options.to = kind;
      const Checkpoint from = Checkpoint::open(kCases + name);
      const std::string target = temporary_directory() + "/a";
      // A file of tensors alone.
      const auto of_tensors = [](Leaf leaf) -> std::optional<Leaf> {
        return leaf.value.is(Value::Kind::tensor) ? std::optional(std::move(leaf)) : std::nullopt;
      };
      const Checkpoint source = kind == CheckpointKind::safetensors ? from.map(of_tensors) : from;
      convert(source, target, options);
      EXPECT_THAT(diff(source, Checkpoint::open(target)), IsEmpty()) << name;
    }
  }
}

// Files as DeepSpeed writes them, of a model with `a` of 5 elements and `b` of [2, 3].
struct ZeroFiles {
  Value model = Value::dict(
      {{"module", Value::dict()},
       {"param_shapes",
        Value::list({Value::dict({{"a", Value::list({5})}, {"b", Value::list({2, 3})}})})},
       {"shared_params", Value::dict()}});
  std::vector<Value> optim;  // of each rank: its optimizer_state_dict
  std::string directory = temporary_directory();

  static Value flat(std::int64_t elements, float first) {
    return Value(counting({elements}, whole({elements}), first, true));
  }
  // The ranks' parts of the group have so many elements.
  static ZeroFiles together(const std::vector<std::int64_t>& parts) {
    ZeroFiles run;
    std::int64_t at = 0;
    for (const std::int64_t part : parts) {
      Value state =
          Value::dict({{"step", 2}, {"exp_avg", flat(part, 100 + static_cast<float>(at))}});
      run.optim.push_back(Value::dict(
          {{"single_partition_of_fp32_groups", Value::list({flat(part, static_cast<float>(at))})},
           {"partition_count", Value::list({static_cast<std::int64_t>(parts.size())})},
           {"base_optimizer_state",
            Value::dict(
                {{"state", Value::dict({{0, state}})},
                 {"param_groups", Value::list({Value::dict({{"params", Value::list({0})}})})}})}}));
      at += part;
    }
    return run;
  }
  // Each rank has so many elements.
  static ZeroFiles each(const std::vector<std::int64_t>& parts) {
    ZeroFiles run;
    for (const std::int64_t part : parts) {
      run.optim.push_back(
          Value::dict({{"fp32_flat_groups", Value::list({flat(part, 0)})},
                       {"partition_count", static_cast<std::int64_t>(parts.size())}}));
    }
    return run;
  }
  [[nodiscard]] std::string optim_file(int rank) const {
    return directory + "/zero_pp_rank_" + std::to_string(rank) + "_mp_rank_00_optim_states.pt";
  }
  [[nodiscard]] std::string write() const {
    save(model, directory + "/mp_rank_00_model_states.pt");
    for (std::size_t rank = 0; rank < optim.size(); ++rank)
      save(Value::dict({{"optimizer_state_dict", optim[rank]}}),
           optim_file(static_cast<int>(rank)));
    return directory;
  }
};

void expect_error(const ZeroFiles& run, ErrorCode code, const std::string& text) {
  const std::string path = run.write();
  try {
    (void)Checkpoint::open(path);
    ADD_FAILURE() << "opened, expected: " << text;
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), code) << error.what();
    EXPECT_THAT(error.what(), HasSubstr(text));
  }
}

// Parts of ranks may be of unequal length (deepspeed #1317), and some ranks have none at all (PR
// 6918). What all have is rounded up to a multiple of twice their number.
TEST(DeepSpeed, PartsMayBeUnequalAndEmpty) {
  for (const std::vector<std::int64_t>& parts : std::vector<std::vector<std::int64_t>>{
           {11}, {12}, {6, 5}, {4, 4, 3}, {11, 0, 0}, {0, 11}, {3, 5, 4}}) {
    const Value tree = Checkpoint::open(ZeroFiles::together(parts).write()).load();
    EXPECT_THAT(floats(tree.at("model").at("a").as_tensor()), ElementsAre(0, 1, 2, 3, 4));
    EXPECT_THAT(floats(tree.at("model").at("b").as_tensor()), ElementsAre(5, 6, 7, 8, 9, 10));
    const Value& state = tree.at("optim").at("state").at("b");
    EXPECT_THAT(floats(state.at("exp_avg").as_tensor()), ElementsAre(105, 106, 107, 108, 109, 110));
    EXPECT_EQ(state.at("step").as_int(), 2);
  }
}

TEST(DeepSpeed, ParametersMayBeAligned) {
  ZeroFiles run = ZeroFiles::together({8, 8});
  for (Value& rank : run.optim) {
    rank.set_item("param_alignment_paddings", Value::list({Value::list({3, 2})}));
  }
  const Value tree = Checkpoint::open(run.write()).load();
  EXPECT_THAT(floats(tree.at("model").at("b").as_tensor()), ElementsAre(8, 9, 10, 11, 12, 13));
}

TEST(DeepSpeed, E01PartsThatAreTooShortOrTooLong) {
  expect_error(ZeroFiles::together({5, 5}), ErrorCode::corrupt, "are 10 elements");
  expect_error(ZeroFiles::together({9, 8}), ErrorCode::corrupt, "are 17 elements");
  expect_error(ZeroFiles::each({5, 5}), ErrorCode::corrupt, "key 'b'");
  expect_error(ZeroFiles::each({7, 7}), ErrorCode::corrupt, "more fp32 values");
}

TEST(DeepSpeed, E02FilesThatAreNotThere) {
  ZeroFiles run = ZeroFiles::together({6, 5});
  run.optim.emplace_back(Value::dict());
  EXPECT_EQ(run.write(), run.directory);
  fs::remove(run.optim_file(1));
  EXPECT_EQ(open_code(run.directory), ErrorCode::incomplete);
  ZeroFiles more = ZeroFiles::together({6, 5});
  for (Value& rank : more.optim) rank.set_item("partition_count", Value::list({3}));
  expect_error(more, ErrorCode::incomplete, "of 3 ranks");
  // Of ZeRO without any of its files.
  ZeroFiles none;
  none.model.set_item("ds_config",
                      Value::dict({{"zero_optimization", Value::dict({{"stage", 2}})}}));
  expect_error(none, ErrorCode::incomplete, "*_optim_states.pt");
  fs::remove(more.directory + "/mp_rank_00_model_states.pt");
  EXPECT_EQ(open_code(more.directory), ErrorCode::incomplete);
}

TEST(DeepSpeed, E03FilesOfTwoSaves) {
  ZeroFiles fewer = ZeroFiles::together({6, 5});
  for (Value& rank : fewer.optim) rank.set_item("partition_count", Value::list({1}));
  expect_error(fewer, ErrorCode::conflict, "of 1 ranks");
  ZeroFiles stages = ZeroFiles::together({6, 5});
  stages.optim[1] = ZeroFiles::each({6, 6}).optim[1];
  expect_error(stages, ErrorCode::conflict, "different stages");
}

TEST(DeepSpeed, E04ValuesThatAreNotWhatTheyShouldBe) {
  const auto broken = [](const std::function<void(ZeroFiles&)>& change, const std::string& text) {
    ZeroFiles run = ZeroFiles::together({6, 5});
    change(run);
    expect_error(run, ErrorCode::corrupt, text);
  };
  const char* const parts = "single_partition_of_fp32_groups";
  broken([](ZeroFiles& run) { run.optim[1] = Value("none"); }, "no optimizer_state_dict");
  broken([&](ZeroFiles& run) { run.optim[0].set_item(parts, Value::list({3})); }, "no flat tensor");
  broken([&](ZeroFiles& run) { run.optim[0].set_item(parts, Value::list({})); }, "no groups");
  broken(
      [&](ZeroFiles& run) {
        run.optim[0].set_item(parts, Value::list({ZeroFiles::flat(3, 0), ZeroFiles::flat(3, 0)}));
      },
      "2 groups of fp32 values");
  broken([](ZeroFiles& run) { run.optim[0].set_item("partition_count", "two"); },
         "partition_count");
  broken(
      [](ZeroFiles& run) {
        run.optim[0].set_item("param_alignment_paddings", Value::list({Value::list({-1, 0})}));
      },
      "param_alignment_paddings");
  broken([](ZeroFiles& run) { run.optim[0].at("base_optimizer_state").at("state").set_item(0, 5); },
         "no dict");
  broken(
      [](ZeroFiles& run) {
        run.optim[0]
            .at("base_optimizer_state")
            .at("state")
            .set_item(0, Value::dict({{"exp_avg", ZeroFiles::flat(7, 0)}}));
      },
      "the state has shape [7]");
  broken([](ZeroFiles& run) { run.model.set_item("param_shapes", Value::list({7})); },
         "no list of dicts");
  broken([](ZeroFiles& run) { run.model.at("param_shapes").at(0).set_item("a", "five"); },
         "no size");
  broken(
      [](ZeroFiles& run) { run.model.at("param_shapes").at(0).set_item("a", Value::list({-5})); },
      "size");
  broken(
      [](ZeroFiles& run) {
        run.model.set_item("frozen_param_shapes", Value::dict({{"a", Value::list({5})}}));
      },
      "twice");
  broken(
      [](ZeroFiles& run) {
        run.model.set_item("frozen_param_shapes", Value::dict({{"f", Value::list({5})}}));
      },
      "frozen_param_fragments");
  broken(
      [](ZeroFiles& run) {
        run.model.set_item("shared_params", Value::dict({{"c", "nobody"}}));
      },
      "no parameter");
}

// Parameters in another order than the flat values have them.
TEST(DeepSpeed, E08OrdersThatDiffer) {
  const std::string copy = copy_of(kCases + "zero1") + "/global_step2/";
  const std::string file = copy + "mp_rank_00_model_states.pt";
  Value model = Checkpoint::open(file).load();
  const Value shapes = model.at("param_shapes").at(0);
  Value turned = Value::dict();
  for (std::size_t i = shapes.size(); i-- > 0;)
    turned.set_item(shapes.pairs()[i].first, shapes.pairs()[i].second);
  model.set_item("param_shapes", Value::list({turned}));
  save(model, file, {.overwrite = true});
  try {
    (void)Checkpoint::open(copy);
    ADD_FAILURE();
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ErrorCode::corrupt);
    EXPECT_THAT(error.what(), HasSubstr("param_slice_mappings"));
  }
}

TEST(DeepSpeed, E05OtherParallelismAndFormsAreNamed) {
  for (const char* name : {"mp_rank_01_model_states.pt", "layer_01-model_00-model_states.pt",
                           "expp_rank_0_mp_rank_00_optim_states.pt"}) {
    const std::string directory = ZeroFiles::together({6, 5}).write();
    write_text(directory + "/" + name, "x");
    EXPECT_EQ(open_code(directory), ErrorCode::unsupported) << name;
  }
  ZeroFiles elastic = ZeroFiles::together({6, 5});
  for (Value& rank : elastic.optim) rank.set_item("base_optimizer_state", Value::list({}));
  expect_error(elastic, ErrorCode::unsupported, "elastic");
  ZeroFiles other = ZeroFiles::together({6, 5});
  other.optim[0] = Value::dict({{"fp32_groups", 1}});
  expect_error(other, ErrorCode::unsupported, "without fp32 values");
  ZeroFiles experts = ZeroFiles::together({6, 5});
  experts.model.set_item("autoep_layers", Value::list({}));
  expect_error(experts, ErrorCode::unsupported, "experts");
}

TEST(DeepSpeed, E06SizesThatOverflow) {
  for (const std::int64_t size : {std::int64_t{1} << 62, (std::int64_t{1} << 62) + 1}) {
    ZeroFiles run = ZeroFiles::together({6, 5});
    run.model.at("param_shapes").at(0).set_item("b", Value::list({size, 4}));
    EXPECT_EQ(open_code(run.write()), ErrorCode::limit);
    ZeroFiles each = ZeroFiles::each({6, 6});
    each.model.at("param_shapes").at(0).set_item("b", Value::list({size}));
    EXPECT_NE(open_code(each.write()), ErrorCode::io);
  }
}

// As DeepSpeed's own ds_to_universal makes it, of ZeRO 1 and of ZeRO 3.
TEST(DeepSpeed, UniversalHasTheSameValues) {
  for (const std::string name : {"zero1", "zero3"}) {
    const Checkpoint expected = Checkpoint::open(kCases + name + ".safetensors");
    for (const char* place : {"_universal", "_universal/global_step2"}) {
      const Checkpoint opened = Checkpoint::open(kCases + name + place);
      EXPECT_EQ(opened.kind, CheckpointKind::deepspeed_universal);
      EXPECT_THAT(diff(expected, opened.only(expected.names())), IsEmpty()) << name << place;
      EXPECT_THAT(verify(kCases + name + place).findings, IsEmpty());
      EXPECT_NE(opened.find("optim.state.l1.weight.step"), nullptr) << name;
      const std::string target = temporary_directory() + "/a.pt";
      ConvertOptions options;
      options.to = CheckpointKind::torch_file;
      convert(opened, target, options);
      EXPECT_THAT(diff(opened, Checkpoint::open(target)), IsEmpty());
    }
  }
}

TEST(DeepSpeed, E07UniversalFilesThatAreNotWhatTheyShouldBe) {
  const auto opened_with = [](const std::function<void(const std::string&)>& change) {
    const std::string copy = copy_of(kCases + "zero3_universal") + "/global_step2";
    change(copy + "/zero/l1.weight/");
    return open_code(copy);
  };
  EXPECT_EQ(opened_with([](const std::string& at) { fs::remove(at + "fp32.pt"); }),
            ErrorCode::incomplete);
  EXPECT_EQ(opened_with([](const std::string& at) { fs::remove_all(at); }), ErrorCode::incomplete);
  EXPECT_EQ(opened_with([](const std::string& at) {
              save(Value::dict({{"param", 3}}), at + "exp_avg.pt", {.overwrite = true});
            }),
            ErrorCode::corrupt);
  EXPECT_EQ(opened_with([](const std::string& at) {
              save(Value::dict({{"param", ZeroFiles::flat(103, 0)}}), at + "exp_avg.pt",
                   {.overwrite = true});
            }),
            ErrorCode::corrupt);
}

// Of ZeRO 3 rank 0's model states are enough (#7546), unless parameters are frozen.
TEST(DeepSpeed, ModelStatesOfRankZeroAreEnough) {
  const auto without = [](const std::string& name) {
    const std::string copy = copy_of(kCases + name) + "/global_step2";
    fs::remove(copy + "/zero_pp_rank_1_mp_rank_00_model_states.pt");
    return copy;
  };
  const Checkpoint expected = Checkpoint::open(kCases + "zero3_groups.safetensors");
  const Checkpoint opened = Checkpoint::open(without("zero3_groups"));
  EXPECT_THAT(diff(expected, opened.only(expected.names())), IsEmpty());
  EXPECT_EQ(open_code(without("zero3")), ErrorCode::incomplete);
}

// A name with a number that no rank has is nobody's.
TEST(DeepSpeed, NumbersInNamesAreBounded) {
  for (const char* rank : {"2147483647", "4294967296", "1048576", "-1", ""}) {
    const std::string directory = ZeroFiles::together({6, 5}).write();
    write_text(directory + "/zero_pp_rank_" + rank + "_mp_rank_00_optim_states.pt", "x");
    EXPECT_EQ(Checkpoint::open(directory).world_size, 2) << rank;
  }
}

TEST(DeepSpeed, LatestNamesADirectoryBesideIt) {
  for (const std::string text :
       {"nothing", "../zero1/global_step2", "/", "", ".", "global_step2/x"}) {
    const std::string copy = copy_of(kCases + "zero1");
    write_text(copy + "/latest", text);
    EXPECT_EQ(open_code(copy), ErrorCode::not_found) << text;
  }
  const std::string copy = copy_of(kCases + "zero1");
  write_text(copy + "/latest", "global_step2\n");
  EXPECT_EQ(Checkpoint::open(copy).kind, CheckpointKind::deepspeed);
}

}  // namespace
}  // namespace tessera
