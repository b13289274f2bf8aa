// The experts of each token (Shazeer et al. 2017, arXiv:1701.06538): those K of E whose scores, with their biases, are
// highest, and the weights of what they compute.
//
//     score = softmax(logits), or with SIGMOID sigmoid(logits)
//     weight = scale * score (/ sum of the scores of the K)
//
// and after them the experts that all tokens have, whose weight is 1 or the sigmoid of one more logit.
//
// Dispatch (tokens folded over x and y), one workgroup per token.
#import reduce t0=reduce t2=reduce_subgroup
#import best
#import order
#import fold

struct Params { n_tokens: u32, n_experts: u32, n_used: u32, flags: u32, scale: f32, n_shared: u32, _pad0: u32, _pad1: u32 } // T, E, K, M
@group(0) @binding(0) var<uniform> params: Params;
@group(0) @binding(1) var<storage, read> logits: array<f32>;             // [T, E], or [T, E + 1] with GATED
@group(0) @binding(2) var<storage, read> bias: array<f32>;               // [E]; any buffer without BIAS
@group(0) @binding(3) var<storage, read_write> routes: array<vec2<u32>>; // [T, K + M] of (expert, bits of its weight)

const WG: u32 = 64u;
const SIGMOID: u32 = 1u;
const BIAS: u32 = 2u;  // `bias` is added for the choice alone
const SHARES: u32 = 4u; // weights are shares of the sum of the chosen scores
const GATED: u32 = 8u;  // the last logit is the gate of the experts that all tokens have
const MOST: u32 = 1024u; // experts

var<workgroup> scores: array<f32, MOST>;
var<workgroup> keys: array<u32, MOST>; // by which experts are chosen; 0: it is chosen already

fn sigmoid(logit: f32) -> f32 {
    return 1.0 / (1.0 + exp(min(-logit, 88.0)));
}

@compute @workgroup_size(WG)
fn route(
    @builtin(workgroup_id) group: vec3<u32>,
    @builtin(num_workgroups) grid: vec3<u32>,
    @builtin(local_invocation_index) local: u32,
) {
    let t = group_index(group, grid);
    if (t >= params.n_tokens) {
        return;
    }
    let is_gated = (params.flags & GATED) != 0u;
    let row = t * (params.n_experts + select(0u, 1u, is_gated));
    let first = t * (params.n_used + params.n_shared);
    let is_sigmoid = (params.flags & SIGMOID) != 0u;
    var highest = LOWEST;
    var sum = 1.0;
    if (!is_sigmoid) {
        for (var e = local; e < params.n_experts; e += WG) {
            highest = max(highest, logits[row + e]);
        }
        highest = workgroup_max(local, highest);
        sum = 0.0;
        for (var e = local; e < params.n_experts; e += WG) {
            sum += exp(logits[row + e] - highest);
        }
        sum = workgroup_sum(local, sum);
    }
    for (var e = local; e < params.n_experts; e += WG) {
        let logit = logits[row + e];
        let score = select(exp(logit - highest) / sum, sigmoid(logit), is_sigmoid);
        scores[e] = score;
        var chosen_by = score;
        if ((params.flags & BIAS) != 0u) {
            chosen_by += bias[e];
        }
        keys[e] = max(order_key(chosen_by), 1u);
    }
    // The invocation that a chosen expert belongs to strikes it off; the others never look at it.
    var total = 0.0;
    for (var s = 0u; s < params.n_used; s++) {
        var mine = vec2<u32>(0u, 0u);
        for (var e = local; e < params.n_experts; e += WG) {
            if (keys[e] > mine.x) {
                mine = vec2<u32>(keys[e], e);
            }
        }
        let chosen = workgroup_best(local, mine).y;
        if (local == chosen % WG) {
            keys[chosen] = 0u;
        }
        if (local == 0u) {
            routes[first + s].x = chosen;
        }
        total += scores[chosen];
    }
    if (local == 0u) {
        let share = select(params.scale, params.scale / total, (params.flags & SHARES) != 0u);
        for (var s = 0u; s < params.n_used; s++) {
            routes[first + s].y = bitcast<u32>(share * scores[routes[first + s].x]);
        }
        var gate = 1.0;
        if (is_gated) {
            gate = sigmoid(logits[row + params.n_experts]);
        }
        for (var s = 0u; s < params.n_shared; s++) {
            routes[first + params.n_used + s] = vec2<u32>(params.n_experts + s, bitcast<u32>(gate));
        }
    }
}
