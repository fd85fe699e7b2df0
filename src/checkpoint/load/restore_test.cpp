// Trainings that ranks take up from checkpoints of OLMo's kinds: O-13, O-41, O-42, O-73, OQ-04.
#include "tessera/restore.h"

#include <gtest/gtest.h>

#include <filesystem>

#include "checkpoint/open/kinds.h"
#include "checkpoint/test_support.h"

namespace tessera {
namespace {

using namespace testing_support;  // NOLINT(google-build-using-namespace)
namespace fs = std::filesystem;

// The state that PyTorch saved as all kinds. Its optim.pt of original parameters is not that:
// PyTorch gave exp_avg the elements of exp_avg_sq there.
Value whole_state(const std::string& golden) {
  return Checkpoint::open(kGolden + golden + "/model_and_optim").load();
}

// A tensor of zeros of which this rank holds the rows of torch.chunk; a scalar is whole.
Value empty_rows(const Tensor& of, const Group& group) {
  Tensor made;
  made.dtype = of.dtype;
  made.shape = of.shape;
  made.sharded = !of.shape.empty();
  const Box box = made.sharded ? chunk(of.shape, group.rank(), group.size()) : whole(of.shape);
  if (numel(box) > 0) {
    made.pieces.push_back(
        {box, memory(static_cast<std::size_t>(numel(box)) * size_of(of.dtype)), 0, {}, -1});
  }
  return Value(std::move(made));
}

// The tree to load into: the leaves of `state` with memory of this rank.
Value live_tree(const Value& state, const Group& group) {
  std::vector<Leaf> leaves = flatten(state);
  for (Leaf& leaf : leaves) {
    if (leaf.value.is(Value::Kind::tensor))
      leaf.value = empty_rows(leaf.value.as_tensor(), group);
    else if (leaf.name.ends_with(".lr"))
      leaf.value = -1.0;
  }
  return unflatten(leaves);
}

std::vector<std::byte> bytes_of(const Tensor& tensor, const Slice& slice) {
  const std::vector<Leaf> leaves = {{"t", {"t"}, Value(tensor)}};
  Checkpoint held;
  held.leaves = leaves;
  const std::size_t size = static_cast<std::size_t>(numel(slice)) * size_of(tensor.dtype);
  std::vector<std::byte> bytes(size);
  Shape shape{numel(slice)};
  if (const auto* box = std::get_if<Box>(&slice)) shape = box->sizes;
  held.read("t", slice, TensorView::of(bytes, tensor.dtype, shape));
  return bytes;
}

void expect_rows(const Value& tree, const Value& state) {
  const std::vector<Leaf> found = flatten(tree);
  const std::vector<Leaf> wanted = flatten(state);
  ASSERT_EQ(found.size(), wanted.size());
  for (std::size_t i = 0; i < found.size(); ++i) {
    ASSERT_EQ(found[i].name, wanted[i].name);
    if (!found[i].value.is(Value::Kind::tensor)) {
      EXPECT_EQ(found[i].value, wanted[i].value) << found[i].name;
      continue;
    }
    const Tensor& tensor = found[i].value.as_tensor();
    for (const Piece& piece : tensor.pieces) {
      EXPECT_EQ(bytes_of(tensor, piece.slice), bytes_of(wanted[i].value.as_tensor(), piece.slice))
          << found[i].name;
    }
  }
}

LoadReport restore(Value& tree, const std::string& where, const LiveNames& live, Group& group,
                   LoadReader reader = LoadReader::every_rank,
                   const NameRules& rules = olmo_name_rules()) {
  LoadOptions options;
  options.reader = reader;
  auto checkpoint = GroupCheckpoint::open(where, options, group);
  checkpoint.arrange(
      [&](const Checkpoint& stored) { return as_training_state(stored, live, rules); });
  return checkpoint.load(tree, options);
}

struct RestoreCase {
  std::string golden;
  std::string kind;
};
// The name is GoogleTest's. NOLINTNEXTLINE(readability-identifier-naming)
void PrintTo(const RestoreCase& row, std::ostream* out) {
  *out << row.golden << "/" << row.kind;
}

class Restore : public testing::TestWithParam<RestoreCase> {};

// Also the local kind, whose optimizer state goes by numbers (O-42), by both readers.
TEST_P(Restore, AnyRanksTakeUpWhatFsdpSaved) {
  const RestoreCase& row = GetParam();
  const Value state = whole_state(row.golden);
  std::string where = kGolden + row.golden;
  if (row.kind == "full") {
    where = temporary_directory();
    for (const char* part : {"/model.pt", "/optim.pt"})
      fs::copy_file(kGolden + row.golden + part, where + part);
  } else {
    where += "/" + row.kind;
  }
  for (int ranks = 1; ranks <= 4; ++ranks) {
    for (const LoadReader reader : {LoadReader::every_rank, LoadReader::rank_zero}) {
      run_ranks(ranks, [&](Group& group) {
        Value tree = live_tree(state, group);
        const LoadReport report = restore(tree, where, names_of(state), group, reader);
        for (const std::string& name : report.extra)
          EXPECT_TRUE(name.starts_with("train.")) << name;
        expect_rows(tree, state);
      });
    }
  }
}

INSTANTIATE_TEST_SUITE_P(
    Golden, Restore,
    testing::Values(RestoreCase{"fsdp1_uop0_ws2", "local"}, RestoreCase{"fsdp1_uop0_ws2", "legacy"},
                    RestoreCase{"fsdp1_uop0_ws2", "model_and_optim"},
                    RestoreCase{"fsdp1_uop0_ws2", "full"}, RestoreCase{"fsdp1_uop1_ws2", "local"},
                    RestoreCase{"fsdp1_uop1_ws2", "legacy"},
                    RestoreCase{"fsdp1_uop1_ws2", "model_and_optim"},
                    RestoreCase{"fsdp1_uop1_ws4", "local"}, RestoreCase{"fsdp1_uop1_ws4", "legacy"},
                    RestoreCase{"fsdp1_uop1_ws4", "model_and_optim"}));

// A model of an older OLMo: blocks in groups of two, a norm for both parts of a block, one group of
// parameters. With a genuine NaN (OQ-03), integers and bfloat16.
Value older_state() {
  const auto five = [](float first) { return Value(counting({5, 3}, whole({5, 3}), first)); };
  Value model = Value::dict({{"transformer.wte.weight", five(1)}});
  for (int i = 0; i < 4; ++i) {
    const std::string block =
        "transformer.block_groups." + std::to_string(i / 2) + "." + std::to_string(i % 2) + ".";
    model.set_item(block + "norm.weight", five(static_cast<float>(100 * i)));
    model.set_item(block + "attn_out.weight", five(static_cast<float>(1000 * i)));
  }
  Tensor odd = counting({5, 3}, whole({5, 3}), 0);
  const std::uint32_t nan = 0x7fc12345;
  std::memcpy(odd.pieces[0].storage->data + 4, &nan, sizeof nan);
  model.set_item("transformer.odd", Value(std::move(odd)));
  Value states = Value::dict();
  Value::List names;
  for (const auto& [key, value] : model.pairs()) {
    if (key.as_string() == "transformer.odd") continue;
    names.push_back(key);
    Tensor square = value.as_tensor();
    square.dtype = DType::bfloat16;
    square.pieces[0].storage->dtype = DType::bfloat16;
    Tensor steps;
    steps.dtype = DType::int64;
    steps.pieces.push_back({whole({}), memory(8), 0, {}, -1});
    steps.pieces[0].storage->data[0] = std::byte{7};
    states.set_item(key, Value::dict({{"exp_avg", value},
                                      {"exp_avg_sq", Value(std::move(square))},
                                      {"step", Value(std::move(steps))}}));
  }
  const Value group = Value::dict({{"params", Value::list(names)},
                                   {"param_names", Value::list(names)},
                                   {"lr", 0.5},
                                   {"weight_decay", 0.1}});
  return Value::dict(
      {{"model", model},
       {"optim", Value::dict({{"state", states}, {"param_groups", Value::list({group})}})}});
}

// The same state as a model has it that goes on: blocks in groups of `size` (0: in one list), two
// norms a block, and two groups of parameters, of which the second has the norms.
Value newer_state(const Value& older, int size) {
  Value model = Value::dict();
  Value states = Value::dict();
  Value::List decay, no_decay;
  const auto add = [&](const std::string& name, const std::string& from, Value::List& group) {
    model.set_item(name, older.at("model").at(from));
    group.emplace_back(name);
    states.set_item(name, older.at("optim").at("state").at(from));
  };
  for (int i = 3; i >= 0; --i) {
    const std::string number = std::to_string(i);
    const std::string from =
        "transformer.block_groups." + std::to_string(i / 2) + "." + std::to_string(i % 2) + ".";
    const std::string to = size == 0 ? "transformer.blocks." + number + "."
                                     : "transformer.block_groups." + std::to_string(i / size) +
                                           "." + std::to_string(i % size) + ".";
    add(to + "attn_out.weight", from + "attn_out.weight", decay);
    add(to + "attn_norm.weight", from + "norm.weight", no_decay);
    add(to + "ff_norm.weight", from + "norm.weight", no_decay);
  }
  add("transformer.wte.weight", "transformer.wte.weight", decay);
  model.set_item("transformer.odd", older.at("model").at("transformer.odd"));
  const auto group = [](const Value::List& names, double weight_decay) {
    return Value::dict({{"params", Value::list(names)},
                        {"param_names", Value::list(names)},
                        {"lr", 0.5},
                        {"weight_decay", weight_decay}});
  };
  return Value::dict(
      {{"model", model},
       {"optim",
        Value::dict({{"state", states},
                     {"param_groups", Value::list({group(decay, 0.1), group(no_decay, 0.0)})}})}});
}

// O-13, O-41, O-42: by every kind that can hold it, and by both readers.
TEST(RestoreNames, ModelOptimizerAndGroupsAreRenamedAlike) {
  const Value older = older_state();
  const std::string work = temporary_directory();
  save(older, work + "/dcp", *solo_group());
  ConvertOptions options;
  std::vector<std::string> places = {work + "/dcp"};
  for (const auto kind : {CheckpointKind::olmo_full, CheckpointKind::olmo_torch_new,
                          CheckpointKind::olmo_legacy, CheckpointKind::torch_file}) {
    options.to = kind;
    options.ranks = row_of(kind).is_split ? 3 : 1;
    places.push_back(work + "/" + std::string(to_string(kind)));
    if (kind == CheckpointKind::torch_file) places.back() += ".pt";
    (void)convert(work + "/dcp", places.back(), options);
  }
  for (const std::string& where : places) {
    SCOPED_TRACE(where);
    for (const int size : {0, 2, 3}) {
      const Value newer = newer_state(older, size);
      for (int ranks = 1; ranks <= 4; ++ranks) {
        for (const LoadReader reader : {LoadReader::every_rank, LoadReader::rank_zero}) {
          run_ranks(ranks, [&](Group& group) {
            Value tree = live_tree(newer, group);
            const LoadReport report = restore(tree, where, names_of(newer), group, reader);
            EXPECT_TRUE(report.extra.empty());
            expect_rows(tree, newer);
          });
        }
      }
    }
  }
}

// And the way back to what OLMo's older models are called, from a checkpoint that each rank opens.
TEST(RestoreNames, BlocksGoBackIntoGroups) {
  const Value older = older_state();
  const Value flat = newer_state(older, 0);
  const std::string work = temporary_directory();
  save(flat, work + "/dcp", *solo_group());
  const Value grouped = newer_state(older, 3);
  run_ranks(2, [&](Group& group) {
    Value tree = live_tree(grouped, group);
    load(tree, as_training_state(Checkpoint::open(work + "/dcp"), names_of(grouped)), {}, group);
    expect_rows(tree, grouped);
  });
}

// FSDP1 saves one of them; a model shows both, and its optimizer one.
TEST(RestoreNames, TiedParametersAreFilledFromTheOneThatIsStored) {
  const Value older = older_state();
  const std::string work = temporary_directory();
  save(older, work + "/dcp", *solo_group());
  NameRules rules = olmo_name_rules();
  rules.renamed.push_back({"transformer.wte.weight", {"transformer.ff_out.weight"}});
  for (const LoadReader reader : {LoadReader::every_rank, LoadReader::rank_zero}) {
    run_ranks(3, [&](Group& group) {
      Value tree = live_tree(older, group);
      Value model(tree.at("model"));
      model.set_item("transformer.ff_out.weight", model.at("transformer.wte.weight"));
      LiveNames live = names_of(older);
      live.names.emplace_back("transformer.ff_out.weight");
      const LoadReport report = restore(tree, work + "/dcp", live, group, reader, rules);
      EXPECT_TRUE(report.missing.empty());
      model.erase("transformer.ff_out.weight");
      expect_rows(tree, older);
    });
  }
}

Checkpoint held(const Value& tree) {
  Checkpoint made;
  made.leaves = leaves_of(tree);
  return made;
}

std::vector<std::string> names_in(const Checkpoint& checkpoint) {
  std::vector<std::string> names;
  for (const Leaf& leaf : checkpoint.leaves) names.push_back(leaf.name);
  std::ranges::sort(names);
  return names;
}

Value optimizer(const Value& states, const Value& params, const Value& names) {
  Value group = Value::dict({{"params", params}});
  if (!names.is(Value::Kind::none)) group.set_item("param_names", names);
  return Value::dict(
      {{"model", Value::dict({{"w", 1}})},
       {"optim", Value::dict({{"state", states}, {"param_groups", Value::list({group})}})}});
}

// OQ-04: OLMo's groups silently lose what it cannot map.
TEST(RestoreNames, AGroupThatWouldLoseAParameterIsRefused) {
  const auto code = [](const Value& params, const Value& names, const LiveNames& live = {}) {
    const Value tree = optimizer(Value::dict(), params, names);
    return code_of([&] { (void)as_training_state(held(tree), live); });
  };
  EXPECT_EQ(code(Value::list({0, 1}), Value()), ErrorCode::mismatch);
  EXPECT_EQ(code(Value::list({0, 1}), Value::list({"w"})), ErrorCode::mismatch);
  EXPECT_EQ(code(Value::list({"w", "_fsdp_wrapped_module.w"}), Value()), ErrorCode::mismatch);
  LiveNames live;
  live.groups = Value::list({Value::dict({{"params", Value::list({"w", "v"})}})});
  EXPECT_EQ(code(Value::list({"w"}), Value(), live), ErrorCode::mismatch);
}

// O-73: as OLMo restores it; state that held nothing else is gone.
TEST(RestoreNames, NormsOfAdaptiveClippingStayBehindInALocalOptimizer) {
  const Value states = Value::dict({{0, Value::dict({{"grad_norm_exp_avg", 1.0}})},
                                    {1, Value::dict({{"grad_norm_exp_avg", 1.0}, {"step", 2.0}})}});
  Checkpoint local = held(optimizer(states, Value::list({0, 1}), Value::list({"v", "w"})));
  local.kind = CheckpointKind::olmo_local;
  EXPECT_EQ(names_in(as_training_state(local)),
            (std::vector<std::string>{"model.w", "optim.param_groups.0.param_names",
                                      "optim.param_groups.0.params", "optim.state.w.step"}));
  local.kind = CheckpointKind::olmo_full;
  EXPECT_NE(as_training_state(local).find("optim.state.v.grad_norm_exp_avg"), nullptr);
}

TEST(RestoreNames, AModelAloneAndOneBelowAKeyAreTrainingStates) {
  const Value model = Value::dict({{"_fsdp_wrapped_module.w", 1}, {"b", 2}});
  const std::vector<std::string> names = {"model.b", "model.w"};
  EXPECT_EQ(names_in(as_training_state(held(model))), names);
  EXPECT_EQ(
      names_in(as_training_state(held(Value::dict({{"app", Value::dict({{"model", model}})}})))),
      names);
  const Value twice = Value::dict({{"_fsdp_wrapped_module.w", 1}, {"w", 2}});
  EXPECT_EQ(code_of([&] { (void)as_training_state(held(twice)); }), ErrorCode::conflict);
}

TEST(RestoreNames, RanksMustWantTheSameNames) {
  const std::string work = temporary_directory();
  save(older_state(), work + "/dcp", *solo_group());
  run_ranks(3, [&](Group& group) {
    auto checkpoint = GroupCheckpoint::open(work + "/dcp", {}, group);
    LiveNames live;
    live.names = {group.rank() == 1 ? "transformer.blocks.0.attn_out.weight" : "other"};
    const auto arrange = [&] {
      checkpoint.arrange([&](const Checkpoint& stored) { return as_training_state(stored, live); });
    };
    EXPECT_EQ(code_of(arrange), ErrorCode::mismatch);
    const auto foreign = [&] {
      checkpoint.arrange([](const Checkpoint&) {
        return held(Value::dict({{"x", Value(counting({2}, whole({2}), 0))}}));
      });
    };
    EXPECT_EQ(code_of(foreign), ErrorCode::invalid_argument);
  });
}

}  // namespace
}  // namespace tessera
