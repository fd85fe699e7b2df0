// Stands in store_capabilities.h now.
#pragma once

#include "tessera/store_capabilities.h"
