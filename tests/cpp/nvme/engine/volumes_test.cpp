// sources: csrc/base/*.cpp csrc/system/*.cpp csrc/nvme/**/*.cpp
//
// Opening the volumes of a store: files, memory, devices with a wrong start.
#include "nvme/engine/volumes.hpp"

#include <stdexcept>
#include <string>

#include "support/expect.hpp"

using namespace memascend;

namespace {

void directories_give_files_in_their_order() {
  const VolumeOptions volumes[] = {{.path = ".", .weight = 3}, {.path = "/tmp", .weight = 0.5}};
  EXPECT(open_volumes(volumes, nullptr).size() == 2);
  EXPECT((weights_of(volumes) == std::vector<double>{3, 0.5}));
}

void with_faults_a_volume_is_memory_of_the_smaller_capacity() {
  MemoryFaults faults;
  faults.capacity_bytes = 1 << 20;
  const VolumeOptions volumes[] = {{.path = "/there/is/no/such"},
                                   {.path = "b", .capacity_bytes = 1 << 16}};
  const std::vector<Volume> opened = open_volumes(volumes, &faults);
  EXPECT(opened[0].limited_growth().nbytes == 1 << 20);
  EXPECT(opened[1].limited_growth().nbytes == 1 << 16);
}

void an_error_names_the_path() {
  bool named = false;
  try {
    open_volume({.path = "/there/is/no/such"});
  } catch (const std::exception& error) {
    named = std::string(error.what()).find("/there/is/no/such") != std::string::npos;
  }
  EXPECT(named);
}

void a_device_without_room_for_a_header_is_refused() {
  for (const std::uint64_t start_bytes : {std::uint64_t{0}, std::uint64_t{4096}}) {
    bool refused = false;
    try {
      open_volume({.path = "/dev/null", .descriptor = 0, .start_bytes = start_bytes});
    } catch (const std::invalid_argument& error) {
      refused = std::string(error.what()).find("start_bytes") != std::string::npos;
    }
    EXPECT(refused);
  }
}

}  // namespace

int main() {
  directories_give_files_in_their_order();
  with_faults_a_volume_is_memory_of_the_smaller_capacity();
  an_error_names_the_path();
  a_device_without_room_for_a_header_is_refused();
  return 0;
}
