// The calculator of docs/memory.md: the account of `memascend plan` for a decoder, in bytes.
// Sizes and models come from memascend/plan; tests/scripts/test_calculator.py compares the results, to the byte.
// bf16, AdamW, one micro-step, every other key of the DeepSpeed JSON as `memascend plan` takes it without --config.
"use strict";

/*
<!-- numbers of the plan: written by scripts/update_docs.py -->
*/
const NUMBERS = {
  "models": {
    "Llama-3.1-70B": {
      "layers": 80,
      "hidden": 8192,
      "inner": 28672,
      "experts": 0,
      "active": 1,
      "queries": 8192,
      "keys": 1024,
      "head": 128,
      "vocabulary": 128256,
      "is_tied": false,
      "has_bias": false,
      "has_qk_norm": false
    },
    "Llama-3.1-8B": {
      "layers": 32,
      "hidden": 4096,
      "inner": 14336,
      "experts": 0,
      "active": 1,
      "queries": 4096,
      "keys": 1024,
      "head": 128,
      "vocabulary": 128256,
      "is_tied": false,
      "has_bias": false,
      "has_qk_norm": false
    },
    "Llama-3.2-1B": {
      "layers": 16,
      "hidden": 2048,
      "inner": 8192,
      "experts": 0,
      "active": 1,
      "queries": 2048,
      "keys": 512,
      "head": 64,
      "vocabulary": 128256,
      "is_tied": true,
      "has_bias": false,
      "has_qk_norm": false
    },
    "Llama-3.2-3B": {
      "layers": 28,
      "hidden": 3072,
      "inner": 8192,
      "experts": 0,
      "active": 1,
      "queries": 3072,
      "keys": 1024,
      "head": 128,
      "vocabulary": 128256,
      "is_tied": true,
      "has_bias": false,
      "has_qk_norm": false
    },
    "Mistral-7B-v0.3": {
      "layers": 32,
      "hidden": 4096,
      "inner": 14336,
      "experts": 0,
      "active": 1,
      "queries": 4096,
      "keys": 1024,
      "head": 128,
      "vocabulary": 32768,
      "is_tied": false,
      "has_bias": false,
      "has_qk_norm": false
    },
    "Mistral-Small-24B-Base-2501": {
      "layers": 40,
      "hidden": 5120,
      "inner": 32768,
      "experts": 0,
      "active": 1,
      "queries": 4096,
      "keys": 1024,
      "head": 128,
      "vocabulary": 131072,
      "is_tied": false,
      "has_bias": false,
      "has_qk_norm": false
    },
    "Mixtral-8x7B": {
      "layers": 32,
      "hidden": 4096,
      "inner": 14336,
      "experts": 8,
      "active": 2,
      "queries": 4096,
      "keys": 1024,
      "head": 128,
      "vocabulary": 32000,
      "is_tied": false,
      "has_bias": false,
      "has_qk_norm": false
    },
    "Qwen2.5-14B": {
      "layers": 48,
      "hidden": 5120,
      "inner": 13824,
      "experts": 0,
      "active": 1,
      "queries": 5120,
      "keys": 1024,
      "head": 128,
      "vocabulary": 152064,
      "is_tied": false,
      "has_bias": true,
      "has_qk_norm": false
    },
    "Qwen2.5-32B": {
      "layers": 64,
      "hidden": 5120,
      "inner": 27648,
      "experts": 0,
      "active": 1,
      "queries": 5120,
      "keys": 1024,
      "head": 128,
      "vocabulary": 152064,
      "is_tied": false,
      "has_bias": true,
      "has_qk_norm": false
    },
    "Qwen2.5-72B": {
      "layers": 80,
      "hidden": 8192,
      "inner": 29568,
      "experts": 0,
      "active": 1,
      "queries": 8192,
      "keys": 1024,
      "head": 128,
      "vocabulary": 152064,
      "is_tied": false,
      "has_bias": true,
      "has_qk_norm": false
    },
    "Qwen2.5-7B": {
      "layers": 28,
      "hidden": 3584,
      "inner": 18944,
      "experts": 0,
      "active": 1,
      "queries": 3584,
      "keys": 512,
      "head": 128,
      "vocabulary": 152064,
      "is_tied": false,
      "has_bias": true,
      "has_qk_norm": false
    },
    "Qwen3-0.6B": {
      "layers": 28,
      "hidden": 1024,
      "inner": 3072,
      "experts": 0,
      "active": 1,
      "queries": 2048,
      "keys": 1024,
      "head": 128,
      "vocabulary": 151936,
      "is_tied": true,
      "has_bias": false,
      "has_qk_norm": true
    },
    "Qwen3-1.7B": {
      "layers": 28,
      "hidden": 2048,
      "inner": 6144,
      "experts": 0,
      "active": 1,
      "queries": 2048,
      "keys": 1024,
      "head": 128,
      "vocabulary": 151936,
      "is_tied": true,
      "has_bias": false,
      "has_qk_norm": true
    },
    "Qwen3-14B": {
      "layers": 40,
      "hidden": 5120,
      "inner": 17408,
      "experts": 0,
      "active": 1,
      "queries": 5120,
      "keys": 1024,
      "head": 128,
      "vocabulary": 151936,
      "is_tied": false,
      "has_bias": false,
      "has_qk_norm": true
    },
    "Qwen3-32B": {
      "layers": 64,
      "hidden": 5120,
      "inner": 25600,
      "experts": 0,
      "active": 1,
      "queries": 8192,
      "keys": 1024,
      "head": 128,
      "vocabulary": 151936,
      "is_tied": false,
      "has_bias": false,
      "has_qk_norm": true
    },
    "Qwen3-4B": {
      "layers": 36,
      "hidden": 2560,
      "inner": 9728,
      "experts": 0,
      "active": 1,
      "queries": 4096,
      "keys": 1024,
      "head": 128,
      "vocabulary": 151936,
      "is_tied": true,
      "has_bias": false,
      "has_qk_norm": true
    },
    "Qwen3-8B": {
      "layers": 36,
      "hidden": 4096,
      "inner": 12288,
      "experts": 0,
      "active": 1,
      "queries": 4096,
      "keys": 1024,
      "head": 128,
      "vocabulary": 151936,
      "is_tied": false,
      "has_bias": false,
      "has_qk_norm": true
    }
  },
  "page_bytes": 4096,
  "fp32_bytes": 4,
  "param_itemsize": 2,
  "gradient_itemsize": 2,
  "master_itemsize": 4,
  "states": 2,
  "stream_itemsizes": [
    2,
    2,
    2,
    8
  ],
  "half_itemsize": 2,
  "sub_group_size": 1000000000,
  "reuse_numel": 1000000000,
  "bounce_bytes": 4194304,
  "small_numel": 67108864,
  "staging_slot_count": 4,
  "staging_slot_bytes": 8388608,
  "staging_slot_bytes_min": 262144,
  "staging_bytes_min": 524288,
  "tile_count": 3,
  "spare_count": 8,
  "written_more_max": 0.05,
  "tile_numel": 1048576,
  "tile_numel_knee": 262144,
  "tile_numel_min": 16384,
  "tiles_per_drive": 2,
  "tile_element_bytes": 16,
  "scratch_element_bytes": 4,
  "parameter_slots_bytes_min": 4194304,
  "slot_bytes_max": 536870912,
  "prefetch_bytes_min": 33554432,
  "repeated_count_min": 3,
  "activation_bytes_min": 1048576,
  "read_gb_s": 3.0,
  "write_gb_s": 0.8,
  "host_reserve_bytes": 3221225472,
  "live_numel": 1000000000,
  "norm_numel": 250000000,
  "norm_tensors": 5,
  "logits_bytes": 12,
  "fused_loss_tensors": 3,
  "in_flight_count": 2,
  "gradient_room_bytes_max": 536870912,
  "device_reserve_bytes": 1610612736,
  "released_bytes_min": 268435456,
  "held_up_bytes": 805306368,
  "held_up_divisor": 32,
  "released_divisor": 64,
  "released_count": 2,
  "rated_bytes": 1200000000000000,
  "aligned_bytes": 1024,
  "swappable_bytes_min": 1048576,
  "buffer_count": 5,
  "buffer_numel": 100000000,
  "resident_numel_max": 1000000000,
  "optimizer_buffer_count": 4
};
/*
<!-- end of numbers of the plan -->
*/

const GIB = 2 ** 30;
const roundedUp = (count, step) => Math.ceil(count / step) * step;
const powerOfTwoUp = (nbytes) => (nbytes ? 2 ** Math.ceil(Math.log2(nbytes)) : 0);
const pageUp = (nbytes) => roundedUp(nbytes, NUMBERS.page_bytes);
const pageDown = (nbytes) => Math.floor(nbytes / NUMBERS.page_bytes) * NUMBERS.page_bytes;
const sum = (values) => values.reduce((total, value) => total + value, 0);
const most = (values) => values.reduce((largest, value) => Math.max(largest, value), 0);

/** Return every parameter of a model, in the module's order: the name of its layer, elements, whether it is a vector. */
function tensorsOf(model) {
  const { hidden, inner, layers, vocabulary, queries, keys, experts } = model;
  const found = [];
  const add = (layer, ...shapes) => {
    for (const shape of shapes) {
      found.push({ layer, numel: shape.reduce((product, n) => product * n, 1), isVector: shape.length === 1 });
    }
  };
  const linear = (rows) => (model.has_bias ? [[rows, hidden], [rows]] : [[rows, hidden]]);
  add("embedding", [vocabulary, hidden]);
  for (let layer = 0; layer < layers; layer += 1) {
    add(layer, ...linear(queries), ...linear(keys), ...linear(keys), [hidden, queries]);
    if (model.has_qk_norm) {
      add(layer, [model.head], [model.head]);
    }
    if (experts) {
      add(layer, [experts, hidden], [experts, 2 * inner, hidden], [experts, hidden, inner]);
    } else {
      add(layer, [inner, hidden], [inner, hidden], [hidden, inner]);
    }
    add(layer, [hidden], [hidden]);
  }
  add("norm", [hidden]);
  if (!model.is_tied) {
    add("head", [vocabulary, hidden]);
  }
  return found;
}

/** Return DeepSpeed's sub-groups, those of vectors last; `numel` and `shards` are of one rank. */
function subGroupsOf(tensors, world) {
  const groups = [];
  for (const isVector of [false, true]) {
    let group = null;
    for (const tensor of tensors.filter((one) => one.isVector === isVector)) {
      if (group === null || group.numel >= NUMBERS.sub_group_size) {
        group = { isVector, tensors: [], numel: 0 };
        groups.push(group);
      }
      group.tensors.push(tensor);
      group.numel += Math.ceil(tensor.numel / world);
    }
  }
  return groups;
}

/** Return a size of models that are not small, or the part of it that a small one is, down to a knee. */
const inProportion = (size, knee, numel) =>
  Math.min(size, Math.max(knee, Math.floor((size * numel) / NUMBERS.small_numel)));

/** Return the bytes of all staging slots of a set, which for activations follow the tokens. */
function stagingBytes(numel, tokens, drives) {
  const { staging_slot_bytes: size, staging_slot_bytes_min: least, staging_slot_count: count } = NUMBERS;
  if (tokens) {
    return drives * count * size;
  }
  const allBytes = numel * Math.max(NUMBERS.param_itemsize, NUMBERS.gradient_itemsize);
  const slot = pageUp(Math.max(least, Math.min(size, Math.floor(allBytes / (count - 1)))));
  return slot * Math.min(drives * count, Math.max(count, 1 + Math.ceil(allBytes / slot)));
}

/** Return the number of tiles: one computed, and for each drive one that is read and one that is written. */
function tileCount(numel, tile, drives) {
  const { tile_count: least, tiles_per_drive: more } = NUMBERS;
  return Math.min(least + (drives - 1) * more, Math.max(least, Math.ceil(numel / Math.max(1, tile))));
}

/** Return the bytes of all tiles. */
const tilesBytes = (numel, tile, drives) =>
  tile * (tileCount(numel, tile, drives) * NUMBERS.tile_element_bytes + NUMBERS.scratch_element_bytes);

/** Return the bytes of gradients that wait for tiles, where the step begins during backward. */
const sparesBytes = (numel, tile, drives) =>
  tile * (NUMBERS.spare_count + tileCount(numel, tile, drives) - NUMBERS.tile_count) * NUMBERS.gradient_itemsize;

/**
 * Return what forward and backward read of parameters: what forward used last stays on the device, or in slots of
 * `held` bytes.
 */
function passesBytes(nbytes, numel, held = 0) {
  const kept = Math.min(numel, Math.floor(NUMBERS.reuse_numel / 2));
  const onDevice = Number((BigInt(nbytes) * BigInt(kept)) / BigInt(numel)); // the product is beyond 2^53
  return 2 * nbytes - Math.max(onDevice, Math.min(nbytes, held));
}

/** Return the account of one rank with memascend, or the least limit where the one stated is below it. */
function memascendAccount(model, tensors, groups, { world, limit, tokens, drives = 1 }) {
  const N = NUMBERS;
  const slotSets = tokens ? 2 : 1;
  const sizes = tensors.map((tensor) => pageUp(Math.ceil(tensor.numel / world) * N.param_itemsize));
  const fitting = sizes.filter((size) => size <= N.slot_bytes_max);
  const counts = new Map();
  fitting.forEach((size) => counts.set(size, (counts.get(size) ?? 0) + 1));
  const repeated = fitting.filter((size) => counts.get(size) >= N.repeated_count_min);
  const slot = most(repeated) || most(fitting) || N.slot_bytes_max;
  const inLayers = new Map();
  tensors.forEach((tensor, index) => {
    const size = sizes[index] <= slot ? sizes[index] : 0;
    inLayers.set(tensor.layer, (inLayers.get(tensor.layer) ?? 0) + size);
  });
  const inUse = most([...inLayers.values()]);
  const layer = Math.max(N.parameter_slots_bytes_min, inUse + slot);
  const numel = sum(tensors.map((tensor) => Math.ceil(tensor.numel / world)));
  const slottedBytes = sum(sizes.filter((size) => size <= slot));
  const aheadOf = (count) => {
    const wanted = pageUp(inProportion(count * N.prefetch_bytes_min, 2 * inUse, numel));
    return Math.min(Math.max(wanted, 2 * slot), slottedBytes);
  };
  const largest = roundedUp(most(groups.map((group) => group.numel)), N.page_bytes);
  const part = Math.min(inProportion(N.tile_numel, N.tile_numel_knee, numel), Math.ceil(numel / N.tile_count));
  const tile = Math.min(largest, roundedUp(part, N.page_bytes));
  const least =
    N.bounce_bytes + slotSets * N.staging_bytes_min + N.parameter_slots_bytes_min +
    tilesBytes(numel, Math.min(tile, N.tile_numel_min), 1);
  if (limit && limit < least) {
    return { least };
  }
  const hostOf = (count) =>
    N.bounce_bytes + slotSets * stagingBytes(numel, tokens, count) + layer + aheadOf(count) +
    tilesBytes(numel, tile, count);
  let served = drives; // under a limit the sizes are those of as many drives as fit
  while (limit && served > 1 && hostOf(served) > limit) {
    served -= 1;
  }
  const ahead = aheadOf(served);
  const aheadLeft = limit ? Math.max(0, pageDown(ahead - Math.max(0, hostOf(served) - limit))) : ahead;
  const slotted = tensors.map((one) => Math.ceil(one.numel / world) * N.param_itemsize).filter((size) => size <= slot);
  const held = aheadLeft >= slot ? Math.min(sum(slotted), layer + aheadLeft) : 0;
  const streams = N.stream_itemsizes.map((itemsize) => itemsize * numel);
  /** Return host memory, and what of each stream is on the drive, with so many bytes for waiting gradients. */
  const divided = (spares) => {
    let host = hostOf(served) + spares;
    let room = limit && served === drives ? Math.max(0, pageDown(limit - host)) : 0;
    host = limit ? Math.min(limit, host) : host;
    const drive = streams.map((nbytes) => {
      const kept = Math.min(nbytes, room);
      room -= Math.min(pageUp(nbytes), room);
      host += pageUp(kept);
      return nbytes - kept;
    });
    return { host, drive };
  };
  const spares = sparesBytes(numel, tile, served);
  let { host, drive } = divided(spares);
  const isSmaller = limit && (served < drives || hostOf(served) + spares > limit); // a buffer would be, for them
  // Steps during backward would write new values of parameters in memory to the drive, too.
  if (isSmaller || streams[0] - drive[0] > N.written_more_max * sum(drive)) {
    ({ host, drive } = divided(0));
  }
  const [parameters, gradients, ...others] = drive;
  const saved = activationBytes(model, tokens);
  const whole = sum(tensors.map((tensor) => tensor.numel));
  const halves = parameters * (N.half_itemsize / N.param_itemsize); // of master weights, which the step reads
  return {
    least,
    host,
    peak: host,
    drive: sum(drive) + saved,
    passes: { read: passesBytes(parameters, whole, held) + saved, written: gradients + saved },
    optimizer: { read: gradients + halves + sum(others), written: parameters + sum(others) },
  };
}

/** Return what goes to the drive of a micro-step: checkpoints of layers, and what the last norm and the loss save. */
function activationBytes(model, tokens) {
  const { param_itemsize: itemsize, fp32_bytes: fp32 } = NUMBERS;
  const hidden = tokens * model.hidden * itemsize;
  if (hidden < NUMBERS.activation_bytes_min) {
    return 0; // smaller ones stay on the device
  }
  const norm = tokens * (fp32 * model.hidden + fp32) + 2 * hidden;
  return model.layers * hidden + norm + tokens * fp32 * model.vocabulary;
}

/** Return the bytes per token of a layer; memascend/plan/layers.py has what they are. */
function layerBytes(model) {
  const { param_itemsize: itemsize, fp32_bytes: fp32 } = NUMBERS;
  const [heads, keyHeads] = [model.queries / model.head, model.keys / model.head];
  const hidden = itemsize * model.hidden;
  const active = model.experts ? model.active : 1;
  const inner = itemsize * model.inner * active;
  const widest = fp32 * model.hidden;
  const norm = widest + 4 + 2 * hidden;
  let rest = 2 * norm + itemsize * (2 * model.queries + 2 * model.keys) + 4 * heads;
  if (model.has_qk_norm) {
    rest += (fp32 + itemsize) * (model.queries + model.keys) + 4 * (heads + keyHeads);
  }
  let [mlp, wide] = [4 * inner, 2 * inner];
  if (model.experts) {
    rest += 4 * model.experts + 40 * active;
    mlp += 2 * hidden * active;
    wide = Math.max(wide, 3 * widest * active);
  }
  const backward = Math.max(rest + mlp + 2 * hidden + wide, rest + NUMBERS.norm_tensors * widest);
  return { hidden, backward, norm, widest };
}

/**
 * Return the peak device memory of one rank, with gradient checkpointing; memascend/plan/context.py has the reasons.
 * Checkpoints are on the device, or with `isElsewhere` on the drive (memascend) or in host memory (stock).
 */
function deviceBytes(model, tensors, { world, batch, isElsewhere, isFused, device, isOurs }) {
  const N = NUMBERS;
  const numel = sum(tensors.map((tensor) => tensor.numel));
  const layers = new Map();
  tensors.forEach((one) => layers.set(one.layer, (layers.get(one.layer) ?? 0) + one.numel));
  const largest = most(tensors.map((one) => one.numel));
  const largestInLayers = most(tensors.filter((one) => Number.isInteger(one.layer)).map((one) => one.numel));
  const inUse = Math.max(Math.floor(N.reuse_numel / 2), largest, most([...layers.values()]));
  // Sizes that the Trainer fills in from the hidden size ("auto").
  const [bucket, prefetch] = [model.hidden ** 2, Math.floor(0.9 * model.hidden ** 2)];
  const ahead = Math.min(prefetch, Math.max(0, N.live_numel - inUse));
  const gathered = Math.min(numel, inUse + ahead) * N.param_itemsize;

  const layer = layerBytes(model);
  const inLayers = batch * model.layers * layer.hidden;
  const isStored = isElsewhere && (!isOurs || batch * layer.hidden >= N.activation_bytes_min);
  const each = batch * (isOurs ? Math.max(layer.hidden, layer.widest) : layer.hidden);
  const saved = isStored ? Math.min(N.in_flight_count * each, inLayers) : inLayers;

  const gradient = (count) => {
    const fits = count <= bucket;
    const reduced = fits ? Math.min(bucket, numel) : count;
    const nbytes = (count + (fits ? reduced : 0)) * N.param_itemsize;
    const piece = Math.min(Math.ceil(count / world), N.norm_numel);
    const ofStock = Math.ceil(reduced / world) * (N.param_itemsize + N.fp32_bytes) + 8 * piece;
    return nbytes + (isOurs ? 0 : ofStock);
  };
  const logits = isFused ? N.fused_loss_tensors * layer.hidden : N.logits_bytes * model.vocabulary;
  const moment = Math.max(
    batch * (logits + layer.norm),
    gradient(largest),
    batch * layer.backward + gradient(largestInLayers)
  );
  let ours = 0;
  if (isOurs) {
    const waiting = Math.min(Math.max(N.released_bytes_min, Math.min(N.held_up_bytes, Math.floor(device / N.held_up_divisor)),
      Math.floor(device / N.released_divisor), N.released_count * largestInLayers * N.param_itemsize), numel * N.param_itemsize);
    const shards = new Map();
    tensors.forEach((one) => shards.set(one.layer, (shards.get(one.layer) ?? 0) + Math.ceil(one.numel / world)));
    const counts = new Map();
    [...shards.values()].forEach((size) => counts.set(size, (counts.get(size) ?? 0) + 1));
    const repeated = [...counts].filter(([, count]) => count >= N.repeated_count_min).map(([size]) => size);
    const room = most(repeated) || most([...counts.keys()]);
    ours = waiting + Math.min(pageUp(room * N.gradient_itemsize), N.gradient_room_bytes_max);
  }
  return gathered + ours + bucket * N.param_itemsize + saved + N.device_reserve_bytes + moment;
}

/** Return the account of one rank with stock DeepSpeed; the names of terms are those of memascend/plan/stock.py. */
function stockAccount(model, tensors, groups, { world, tokens }) {
  const N = NUMBERS;
  const aligned = (numel, itemsize) => roundedUp(numel, N.aligned_bytes / itemsize) * itemsize;
  const shard = (tensor) => Math.ceil(tensor.numel / world);
  const nbytes = (tensor) => shard(tensor) * N.param_itemsize;
  const isSwappable = (tensor) => nbytes(tensor) >= N.swappable_bytes_min;
  const isSwapped = (group) => group.numel * N.master_itemsize >= N.swappable_bytes_min;

  let [cache, seen] = [0, 0];
  const resident = new Set();
  for (const isVector of [false, true]) {
    const kind = groups.filter((group) => group.isVector === isVector);
    const all = sum(kind.map((group) => group.numel));
    const room = Math.min(all, Math.max(0, N.resident_numel_max - seen));
    seen += all;
    cache += powerOfTwoUp(room * N.param_itemsize);
    let end = 0;
    for (const group of kind) {
      end += group.numel;
      if (end <= room) {
        resident.add(group);
      }
    }
  }
  const kept = new Set([...resident].flatMap((group) => group.tensors));
  const learning = sum(groups.map((group) => group.numel));
  const groupMax = most(groups.map((group) => group.numel));
  const largest = groups.find((group) => group.numel === groupMax);
  const isAllResident = groups.every((group) => resident.has(group));
  const flat = powerOfTwoUp(N.gradient_itemsize * learning);
  const widest = most(tensors.filter(isSwappable).map(shard));
  const host = sum([
    N.buffer_count * aligned(Math.max(N.buffer_numel, widest), N.param_itemsize),
    cache,
    isAllResident ? 0 : sum(largest.tensors.map((tensor) => aligned(tensor.numel, N.param_itemsize))),
    N.optimizer_buffer_count * aligned(groupMax, N.master_itemsize),
    flat,
    ...tensors.filter((one) => !isSwappable(one) && !kept.has(one)).map((one) => powerOfTwoUp(nbytes(one))),
    ...groups.filter((group) => !isSwapped(group)).map((group) => {
      const master = group.numel * N.master_itemsize;
      return master * (1 + N.states) + powerOfTwoUp(master);
    }),
  ]);

  const swapped = groups.filter(isSwapped);
  const first = host - flat + N.master_itemsize * groupMax; // gradients of the first sub-group, before flat ones
  const start = Math.max(host + N.gradient_itemsize * learning, first);
  const state = N.master_itemsize * N.states * most(swapped.map((group) => group.numel));
  const checkpoints = model.layers * powerOfTwoUp(tokens * model.hidden * N.param_itemsize);

  const onDrive = tensors.filter(isSwappable);
  const travelling = sum(onDrive.filter((tensor) => !kept.has(tensor)).map(nbytes));
  const step = N.aligned_bytes / N.fp32_bytes;
  const gradients = sum(
    swapped
      .flatMap((group) => group.tensors)
      .map((tensor) => Math.floor(shard(tensor) / step) * step * N.fp32_bytes)
      .filter((size) => size >= N.swappable_bytes_min)
  );
  const master = sum(swapped.map((group) => aligned(group.numel, N.master_itemsize)));
  const others = gradients + master * (1 + N.states);
  return {
    host,
    peak: Math.max(start, host + state + checkpoints),
    drive: sum(onDrive.map((tensor) => aligned(shard(tensor), N.param_itemsize))) + others,
    passes: { read: passesBytes(travelling, sum(tensors.map((tensor) => tensor.numel))), written: gradients },
    optimizer: { read: others, written: travelling + others - gradients },
  };
}

/** Return the seconds in which drives move so much; memascend/plan/drive_rates.py has the reasons. */
function secondsOf({ read, written }, rates) {
  const both = Math.min(read, written);
  const mixed = rates.mixed || 2 / (1 / rates.read + 1 / rates.written);
  const together = (2 * both) / mixed + (read - both) / rates.read + (written - both) / rates.written;
  return Math.max(read / rates.read, written / rates.written, together) / 1e9;
}

/** Return the drive time of a step of one rank: that of the passes, then that of the optimizer. */
const stepSeconds = ({ passes, optimizer }, rates) => secondsOf(passes, rates) + secondsOf(optimizer, rates);

/** Return the bytes that go one way in a step. */
const movedIn = ({ passes, optimizer }, way) => passes[way] + optimizer[way];

/**
 * Return both accounts of one rank.
 * options: world (ranks), limit (bytes of host memory, 0 without one), tokens (of a micro-step whose checkpoints leave
 * the device, 0 where they stay), drives (for each rank; 1 if left out).
 */
function accountsOf(model, options) {
  const tensors = tensorsOf(model);
  const groups = subGroupsOf(tensors, options.world);
  return {
    parameters: sum(tensors.map((tensor) => tensor.numel)),
    stock: stockAccount(model, tensors, groups, options),
    memascend: memascendAccount(model, tensors, groups, options),
  };
}

// -- the form ------------------------------------------------------------------------------------

const OWN = "own numbers";
const COUNT_MAX = 1e9; // what a field takes; keeps the arithmetic finite
const LAYERS_MAX = 1e4; // and the page quick
const RATE_MIN = 0.001;
const MODEL_FIELDS = [
  ["layers", "layers"],
  ["hidden", "hidden size"],
  ["inner", "width of the MLP, or of an expert"],
  ["experts", "experts of a layer, 0 without"],
  ["active", "experts of a token"],
  ["queries", "heads times their size"],
  ["keys", "key-value heads times their size"],
  ["head", "size of a head"],
  ["vocabulary", "vocabulary"],
];
const MODEL_FLAGS = [
  ["is_tied", "the output head is the embedding"],
  ["has_bias", "queries, keys and values have biases"],
  ["has_qk_norm", "queries and keys are normalized"],
];
const RUN_FIELDS = [
  ["nodes", "machines", 1],
  ["ranks", "GPUs of each", 1],
  ["drives", "drives of each", 1],
  ["read", "GB/s that a drive reads", NUMBERS.read_gb_s],
  ["written", "GB/s that it writes for long", NUMBERS.write_gb_s],
  ["mixed", "GB/s of both at the same time; 0: they take turns", 0],
  ["memory", "host memory of each, GiB", 32],
  ["limit", "host_memory_limit, GiB; 0: none", 0],
  ["device", "memory of a GPU, GiB", 24],
  ["tokens", "tokens per micro-batch", 4096],
  ["rated", "TB that a drive is rated for", NUMBERS.rated_bytes / 1e12],
];
const RUN_FLAGS = [
  ["is_elsewhere", "saved activations on the drive (stock: in host memory)", false],
  ["is_fused", "fused loss, as Liger's", true],
];
const WEAR_STEPS = 1000;

/** The model that is shown first. */
const FIRST = "Llama-3.1-8B";

/** Return the value of a field, or NaN where it is none that a run could have. */
function readNumber(form, name) {
  const field = form.elements[name];
  return field.checkValidity() && field.value !== "" ? Number(field.value) : NaN;
}

/** Return the table of both accounts for one machine, as HTML, and what to make of it. */
function resultOf(model, entered, name) {
  const { nodes, ranks, drives, read, written, mixed, memory, limit, tokens, device, rated } = entered;
  const world = nodes * ranks;
  const saved = entered.is_elsewhere ? tokens : 0;
  const run = { world, limit: limit * GIB, tokens: saved, drives: Math.ceil(drives / ranks) };
  const { parameters, stock, memascend } = accountsOf(model, run);
  const least = `${((memascend.least / GIB) * 1024).toFixed(1)} MiB`;
  if (memascend.host === undefined) {
    return `<p>The limit is below the least that works, ${least} for each rank.</p>`;
  }
  const gib = (nbytes) => (nbytes / GIB).toFixed(1);
  const row = (title, cell) => `<tr><td>${title}</td><td>${cell(stock)}</td><td>${cell(memascend)}</td></tr>`;
  const other = NUMBERS.host_reserve_bytes;
  const fits = (account) => ((account.peak + other) * ranks <= memory * GIB ? "yes" : "no");
  const rates = { read: read * drives, written: written * drives, mixed: mixed * drives };
  const secondsOfStep = (account) => stepSeconds(account, rates) * ranks;
  const tensors = tensorsOf(model);
  const onDevice = (account) =>
    deviceBytes(model, tensors, {
      world, batch: tokens, isElsewhere: entered.is_elsewhere, isFused: entered.is_fused,
      device: Math.floor(device * GIB), isOurs: account === memascend,
    });
  const perSecond = (account) => Math.floor((tokens * world) / secondsOfStep(account)).toLocaleString("en");
  const terabytes = (account) => (WEAR_STEPS * movedIn(account, "written") * ranks) / drives / 1e12;
  const stated = `--drive-read ${rates.read} --drive-write ${rates.written}${mixed ? ` --drive-mixed ${rates.mixed}` : ""}`;
  const options = `--world ${world} --nodes ${nodes}${limit ? ` --limit ${limit}GiB` : ""} ${stated}`;
  const volumes = drives > 1 ? ` with a --config that has ${drives} <code>volumes</code>` : "";
  const command = name === OWN ? "" : `<p><code>memascend plan ${name} ${options}</code>${volumes} says more.</p>`;
  return `<p>${(parameters / 1e9).toFixed(2)} billion parameters. For each machine, in GiB:</p>
    <table><thead><tr><th></th><th>stock</th><th>memascend</th></tr></thead><tbody>
    ${row("host memory", (account) => gib(account.host * ranks))}
    ${row("at its highest", (account) => gib(account.peak * ranks))}
    ${row(`fits in ${memory}, with ${gib(other * ranks)} for Python and torch`, fits)}
    ${row("memory of a GPU", (account) => gib(onDevice(account)))}
    ${row(`fits in ${device}`, (account) => (onDevice(account) <= device * GIB ? "yes" : "no"))}
    ${row("on the drives", (account) => gib(account.drive * ranks))}
    ${row("read in a step", (account) => gib(movedIn(account, "read") * ranks))}
    ${row("written in a step", (account) => gib(movedIn(account, "written") * ranks))}
    ${row("the drives need for a step", (account) => `${secondsOfStep(account).toFixed(1)} s`)}
    ${row("tokens per second, at most", perSecond)}
    ${row(`${WEAR_STEPS} steps write to a drive`, (account) => `${terabytes(account).toPrecision(3)} TB`)}
    ${row(`of the ${rated} TB that it is rated for`, (account) => `${Math.round((100 * terabytes(account)) / rated)}%`)}
    </tbody></table>
    <p>The least <code>host_memory_limit</code> that works is ${least} for each rank.</p>${command}`;
}

/** Make the form, and answer whatever is entered. */
function startCalculator(place) {
  const label = (text, field) => `<label><span>${text}</span>${field}</label>`;
  const input = (name, text, value, least, step = 1) => {
    const most = name === "layers" ? LAYERS_MAX : COUNT_MAX;
    const range = `min="${least}" max="${most}" step="${step}"`;
    return label(text, `<input name="${name}" type="number" ${range} value="${value}">`);
  };
  const leastOf = (text, value) => (value && text.includes("GB/s") ? RATE_MIN : Math.min(value, 1));
  const names = [...Object.keys(NUMBERS.models), OWN];
  const choice = names.map((name) => `<option${name === FIRST ? " selected" : ""}>${name}</option>`).join("");
  place.innerHTML = `<form class="calculator">
    <fieldset>${label("model", `<select name="model">${choice}</select>`)}
    ${RUN_FIELDS.map(([name, text, value]) => input(name, text, value, leastOf(text, value), /GiB|GB|TB/.test(text) ? "any" : 1)).join("")}
    ${RUN_FLAGS.map(([name, text, value]) => label(text, ` <input name="${name}" type="checkbox"${value ? " checked" : ""}>`)).join("")}</fieldset>
    <details><summary>the model's numbers</summary><fieldset>${MODEL_FIELDS.map(([name, text]) => input(name, text, 1, name === "experts" ? 0 : 1)).join("")}
    ${MODEL_FLAGS.map(([name, text]) => label(text, ` <input name="${name}" type="checkbox">`)).join("")}</fieldset></details>
    </form><div class="calculator-result" aria-live="polite"></div>`;
  const [form, result] = place.children;
  const fields = [...MODEL_FIELDS, ...MODEL_FLAGS].map(([name]) => name);
  const fill = () => {
    const model = NUMBERS.models[form.elements.model.value] ?? {};
    for (const [name, value] of Object.entries(model)) {
      form.elements[name][typeof value === "boolean" ? "checked" : "value"] = value;
    }
  };
  const show = () => {
    const read = (names) => Object.fromEntries(names.map((name) => [name, readNumber(form, name)]));
    const model = read(MODEL_FIELDS.map(([name]) => name));
    const run = read(RUN_FIELDS.map(([name]) => name));
    MODEL_FLAGS.forEach(([name]) => (model[name] = form.elements[name].checked));
    RUN_FLAGS.forEach(([name]) => (run[name] = form.elements[name].checked));
    const wrong = Object.entries({ ...model, ...run }).find(([, value]) => Number.isNaN(value));
    result.innerHTML = wrong
      ? `<p>${form.elements[wrong[0]].validationMessage || "Enter a number in every field."}</p>`
      : resultOf(model, run, form.elements.model.value);
  };
  form.addEventListener("input", (event) => {
    if (event.target.name === "model") {
      fill();
    } else if (fields.includes(event.target.name)) {
      form.elements.model.value = OWN;
    }
    show();
  });
  form.addEventListener("change", show);
  form.addEventListener("submit", (event) => event.preventDefault());
  fill();
  show();
}

document.addEventListener("DOMContentLoaded", () => startCalculator(document.getElementById("calculator-place")));
