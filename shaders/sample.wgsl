// Draws a token from logits with temperature, top-k, top-p and min-p, in one workgroup and without sorting:
//
//     1. highest logit; NON_FINITE is drawn if any logit is NaN or infinite
//     2. top-k:  the largest key with at least k logits at or above it (all ties with the k-th stay)
//     3. top-p:  the largest key such that the logits at or above it hold a share p of what top-k left
//     4. min-p:  a probability of at least min_p times the highest one
//     5. draw from exp((logit - highest) / temperature) over what is left, in the order of ids
//
// Keys order floats as unsigned integers, so steps 2 and 3 are radix selections: four passes, eight bits each, over
// histograms of counts or of fixed-point probability. Integer sums do not depend on order, so the result is
// deterministic. Holtzman et al. 2020, arXiv:1904.09751 (top-p); Nguyen et al. 2024, arXiv:2407.01082 (min-p).
//
// Dispatch (1, 1, 1).
#import reduce
#import order
#import sampling
#import state

struct Params { n_vocab: u32, _pad0: u32, _pad1: u32, _pad2: u32 }
@group(0) @binding(0) var<uniform> params: Params;
@group(0) @binding(1) var<storage, read> sampling: array<u32>;   // sampling settings
@group(0) @binding(2) var<storage, read> state: array<u32>;      // step state
@group(0) @binding(3) var<storage, read> logits: array<f32>;     // [V]
@group(0) @binding(4) var<storage, read_write> ids: array<u32>;  // [1]

const WG: u32 = 256u;
const FIXED: f32 = 1073741824.0; // 2^30 stands for probability 1: sums of a whole vocabulary stay below 2^32

var<workgroup> histogram: array<atomic<u32>, 256>;
var<workgroup> bin: u32;
var<workgroup> remaining: u32;
var<workgroup> sums: array<f32, WG>;
var<workgroup> chosen: u32;

// PCG hash, Jarzynski & Olano 2020, "Hash Functions for GPU Rendering".
fn pcg(input: u32) -> u32 {
    let mixed = input * 747796405u + 2891336453u;
    let word = ((mixed >> ((mixed >> 28u) + 4u)) ^ mixed) * 277803737u;
    return (word >> 22u) ^ word;
}

// The largest key such that the weights of all logits whose key is at least that (and at least `cut`) reach `target`.
// A logit's weight is 1, or its probability in fixed point where `by_mass`.
fn select_key(local: u32, cut: u32, target_weight: u32, by_mass: bool, highest: f32, total: f32) -> u32 {
    var prefix = 0u;
    var wanted = target_weight;
    for (var shift = 24i; shift >= 0i; shift -= 8i) {
        atomicStore(&histogram[local], 0u);
        workgroupBarrier();
        for (var c = local; c < params.n_vocab; c += WG) {
            let key = order_key(logits[c]);
            // Shifts by 32 are not defined, so the first pass compares nothing.
            let in_prefix = shift == 24i || (key >> (u32(shift) + 8u)) == (prefix >> (u32(shift) + 8u));
            if (in_prefix && key >= cut) {
                var weight = 1u;
                if (by_mass) {
                    weight = u32(exp(logits[c] - highest) / total * FIXED);
                }
                atomicAdd(&histogram[(key >> u32(shift)) & 255u], weight);
            }
        }
        workgroupBarrier();
        if (local == 0u) {
            // From the highest bin down to the one that reaches the target; rounding may leave none, then the lowest.
            var need = wanted;
            var at = 255u;
            while (at > 0u && atomicLoad(&histogram[at]) < need) {
                need -= atomicLoad(&histogram[at]);
                at--;
            }
            bin = at;
            remaining = need;
        }
        prefix |= workgroupUniformLoad(&bin) << u32(shift);
        wanted = workgroupUniformLoad(&remaining);
    }
    return prefix;
}

@compute @workgroup_size(WG)
fn sample(@builtin(local_invocation_index) local: u32) {
    var highest = LOWEST;
    var broken = 0.0;
    for (var c = local; c < params.n_vocab; c += WG) {
        if (is_finite(logits[c])) {
            highest = max(highest, logits[c]);
        } else {
            broken = 1.0;
        }
    }
    highest = workgroup_max(local, highest);
    if (workgroup_max(local, broken) > 0.0) {
        if (local == 0u) {
            ids[0] = NON_FINITE;
        }
        return;
    }

    var cut = 0u;
    let k = sampling[TOP_K];
    if (k > 0u && k < params.n_vocab) {
        cut = select_key(local, 0u, k, false, highest, 1.0);
    }
    let top_p = bitcast<f32>(sampling[TOP_P]);
    if (top_p < 1.0) {
        var mass = 0.0;
        for (var c = local; c < params.n_vocab; c += WG) {
            if (order_key(logits[c]) >= cut) {
                mass += exp(logits[c] - highest);
            }
        }
        let total = workgroup_sum(local, mass);
        cut = max(cut, select_key(local, cut, max(u32(top_p * FIXED), 1u), true, highest, total));
    }
    let min_p = bitcast<f32>(sampling[MIN_P]);
    if (min_p > 0.0) {
        // Not above the highest itself: log may round up, and -0 + 0 is +0, whose key is larger.
        cut = max(cut, min(order_key(highest + log(min_p)), order_key(highest)));
    }

    // Each invocation owns a run of ids; the run in which the draw falls is then walked by its owner.
    let temperature = bitcast<f32>(sampling[TEMPERATURE]);
    let run = (params.n_vocab + WG - 1u) / WG;
    let start = min(local * run, params.n_vocab);
    let end = min(start + run, params.n_vocab);
    var sum = 0.0;
    for (var c = start; c < end; c++) {
        if (order_key(logits[c]) >= cut) {
            sum += exp((logits[c] - highest) / temperature);
        }
    }
    sums[local] = sum;
    workgroupBarrier();
    var before = 0.0;
    var total = 0.0;
    for (var i = 0u; i < WG; i++) {
        if (i == local) {
            before = total;
        }
        total += sums[i];
    }
    let pos = state[POS] + state[N_TOKENS]; // of the token to be drawn
    let bits = pcg(sampling[SEED_LOW] ^ pcg(sampling[SEED_HIGH] ^ pcg(pos)));
    let threshold = f32(bits >> 8u) * 0x1p-24 * total;
    if (sum > 0.0 && before <= threshold && threshold < before + sum) {
        // Rounding may leave the walk short of the threshold; then the run's last candidate is the one.
        var mark = before;
        var last = start;
        for (var c = start; c < end; c++) {
            if (order_key(logits[c]) >= cut) {
                last = c;
                mark += exp((logits[c] - highest) / temperature);
                if (mark > threshold) {
                    break;
                }
            }
        }
        ids[0] = last;
    }
}
