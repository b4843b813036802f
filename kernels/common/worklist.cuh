// What one group of query heads reads in decode, shared by all kernels that make,
// sample from or attend over such lists.
#pragma once

#include <stdint.h>

#include "launch.cuh"

namespace taper {

using WorkList = TaperWorkList;

static_assert(sizeof(WorkList) == 64, "shared with the caller");

}  // namespace taper
