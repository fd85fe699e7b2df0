#include "checkpoint/check/saved_state.h"

#include <atomic>

#include <gmock/gmock.h>
#include <nlohmann/json.hpp>

#include "checkpoint/read/side_file.h"
#include "checkpoint/together/testing.h"
#include "storage/forwarding_store.h"
#include "tessera/verify.h"

namespace tessera {

// Digests of a training state that do not fit its tensors: checkpoint-rows O-40, O-50, O-60, O-72.

namespace {

using namespace testing_support;  // NOLINT(google-build-using-namespace)
using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::HasSubstr;

constexpr const char* kDigestsFile = "c/tessera-state.json";

struct DigestedSave {
  CheckpointKind kind;
  bool safetensors = false;
};
const std::vector<DigestedSave> kDigestedSaves = {{CheckpointKind::olmo_full},
                                                  {CheckpointKind::olmo_full, true},
                                                  {CheckpointKind::olmo_torch_new},
                                                  {CheckpointKind::olmo_legacy},
                                                  {CheckpointKind::olmo_local}};

std::shared_ptr<Store> digested(const DigestedSave& save) {
  const auto store = memory_store();
  SaveOptions options = options_for(save.kind);
  options.olmo.safetensors = save.safetensors;
  save_by(2, Cut::flat, Location(store, "c"), options);
  return store;
}

Location place_in(const std::shared_ptr<Store>& store) {
  return std::make_shared<SubStore>(store, "c");
}

// Changes the digests by name.
void edit_digests(Store& store, const std::function<void(nlohmann::json& digests)>& edit) {
  const std::vector<std::byte> bytes = read_all(*store.open(kDigestsFile), 1 << 20);
  const auto* text = reinterpret_cast<const char*>(bytes.data());
  nlohmann::json file = nlohmann::json::parse(text, text + bytes.size());
  edit(file["crc32"]);
  const std::string edited = file.dump();
  put(store, kDigestsFile, std::as_bytes(std::span(edited)), IfExists::replace);
}

std::vector<std::string> findings_in(const Location& where, const VerifyOptions& options = {}) {
  std::vector<std::string> texts;
  for (const Finding& finding : verify(where, options).findings) texts.push_back(finding.text);
  return texts;
}

TEST(SavedState, OfEveryKindIsComparedWithItsDigests) {
  for (const DigestedSave& one : kDigestedSaves) {
    SCOPED_TRACE(std::string(to_string(one.kind)) + (one.safetensors ? " safetensors" : ""));
    const auto store = digested(one);
    const Location where = place_in(store);
    EXPECT_THAT(findings_in(where), ElementsAre());
    edit_digests(*store, [](nlohmann::json& digests) {
      for (const char* name :
           {"model.transformer.blocks.0.w", "optim.state.transformer.wte.weight.exp_avg"})
        digests[name] = digests.at(name).get<std::uint32_t>() ^ 1U;
      digests.erase("optim.state.transformer.ln_f.weight.exp_avg");
      digests["model.transformer.more"] = 5;
    });
    EXPECT_THAT(
        findings_in(where),
        ::testing::UnorderedElementsAre(
            AllOf(HasSubstr("mismatch: the tensor's bytes are not those that were saved"),
                  HasSubstr("model.transformer.blocks.0.w")),
            AllOf(HasSubstr("mismatch"), HasSubstr("wte.weight.exp_avg")),
            AllOf(HasSubstr("incomplete: the checkpoint has a tensor without a digest"),
                  HasSubstr("optim.state.transformer.ln_f.weight.exp_avg")),
            AllOf(HasSubstr("incomplete: a digest is of a tensor that the checkpoint lacks"),
                  HasSubstr("model.transformer.more"))));
    // Nothing is compared if no data, or a part, is asked for.
    EXPECT_THAT(findings_in(where, {.read_data = false}), ElementsAre());
    EXPECT_TRUE(verify(Checkpoint::open(where).only({"model"})).findings.empty());
  }
}

// The files are whole, and all of their checksums fit; but they are of another state.
TEST(SavedState, FilesOfAnotherStateAreFound) {
  for (const DigestedSave& one : kDigestedSaves) {
    SCOPED_TRACE(to_string(one.kind));
    const auto store = digested(one);
    const std::vector<std::byte> digests = read_all(*store->open(kDigestsFile), 1 << 20);
    run_ranks(2, [&](Group& group) {
      Value tree = state_of(Cut::flat, group.rank(), 2);
      const Tensor& changed = tree.at("model").at("transformer.wte.weight").as_tensor();
      for (const Piece& piece : changed.pieces)
        if (piece.storage->size > 0) piece.storage->data[0] ^= std::byte{1};
      SaveOptions options = options_for(one.kind);
      options.olmo.safetensors = one.safetensors;
      options.overwrite = true;
      save(tree, Location(store, "c"), options, group);
    });
    EXPECT_THAT(findings_in(place_in(store)), ElementsAre());
    put(*store, kDigestsFile, digests, IfExists::replace);
    EXPECT_THAT(
        findings_in(place_in(store)),
        ElementsAre(AllOf(HasSubstr("mismatch"), HasSubstr("model.transformer.wte.weight"))));
  }
}

// Opening a checkpoint asks for the save before and after, but does not read all digests for that.
TEST(SavedState, ASaveIsToldByTheEndOfItsFile_C04) {
  class Counting final : public ByteSource {
   public:
    Counting(std::shared_ptr<ByteSource> inner, std::atomic<std::uint64_t>& bytes)
        : inner_(std::move(inner)), bytes_(bytes) {}
    [[nodiscard]] std::uint64_t size() const override { return inner_->size(); }
    void read_at(std::uint64_t offset, MutableByteView out) const override {
      bytes_ += out.size();
      inner_->read_at(offset, out);
    }
    [[nodiscard]] const std::string& name() const override { return inner_->name(); }

   private:
    std::shared_ptr<ByteSource> inner_;
    std::atomic<std::uint64_t>& bytes_;
  };
  class CountingStore final : public testing_support::ForwardingStore {
   public:
    using ForwardingStore::ForwardingStore;
    [[nodiscard]] std::shared_ptr<ByteSource> open(std::string_view name) const override {
      auto source = ForwardingStore::open(name);
      return name == kDigestsFile ? std::make_shared<Counting>(source, bytes) : source;
    }
    mutable std::atomic<std::uint64_t> bytes = 0;
  };
  const auto first = digested({CheckpointKind::olmo_legacy});
  const auto second = digested({CheckpointKind::olmo_legacy});
  EXPECT_NE(save_mark_of(SubStore(first, "c")), save_mark_of(SubStore(second, "c")));
  const auto counting = std::make_shared<CountingStore>(first);
  const std::uint64_t all = counting->open(kDigestsFile)->size();
  EXPECT_GT(all, 1024U);
  (void)Checkpoint::open(place_in(counting));
  EXPECT_GT(counting->bytes, 0U);
  EXPECT_LT(counting->bytes, all / 2);
}

// OLMo's own, and damage.
TEST(SavedState, IsComparedWhereThereIsOne) {
  const auto store = digested({CheckpointKind::olmo_legacy});
  const Location where = place_in(store);
  put(*store, kDigestsFile, {}, IfExists::replace);
  EXPECT_THAT(findings_in(where), ElementsAre(HasSubstr("corrupt: not the digests of a state")));
  store->remove(kDigestsFile);
  EXPECT_THAT(findings_in(where), ElementsAre());
}

}  // namespace
}  // namespace tessera
