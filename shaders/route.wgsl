// The experts of each token (Shazeer et al. 2017, arXiv:1701.06538): those K of E whose scores, with their biases, are
// highest, and the weights of what they compute.
//
//     score = softmax(logits), or with SIGMOID sigmoid(logits)
//     weight = scale * score (/ sum of the scores of the K) (* factor[expert])
//
// With groups (DeepSeek-AI 2024, arXiv:2412.19437), experts are chosen from the best groups alone, by their best score, or
// with TOP_TWO by the sum of their two best ones, biases included.
//
// and after them the experts that all tokens have, whose weight is 1 or the sigmoid of one more logit.
//
// Dispatch (tokens folded over x and y), one workgroup per token.
#import reduce t0=reduce t2=reduce_subgroup
#import best
#import order
#import fold

struct Params { n_tokens: u32, n_experts: u32, n_used: u32, flags: u32, scale: f32, n_shared: u32, n_groups: u32, n_groups_used: u32 } // T, E, K, M
@group(0) @binding(0) var<uniform> params: Params;
@group(0) @binding(1) var<storage, read> logits: array<f32>;             // [T, E], or [T, E + 1] with GATED
@group(0) @binding(2) var<storage, read> bias: array<f32>;               // [E]; any buffer without BIAS
@group(0) @binding(3) var<storage, read> factors: array<f32>;            // [E]; any buffer without FACTORS
@group(0) @binding(4) var<storage, read_write> routes: array<vec2<u32>>; // [T, K + M] of (expert, bits of its weight)

const WG: u32 = 64u;
const SIGMOID: u32 = 1u;
const BIAS: u32 = 2u;  // `bias` is added for the choice alone
const SHARES: u32 = 4u; // weights are shares of the sum of the chosen scores
const GATED: u32 = 8u;  // the last logit is the gate of the experts that all tokens have
const FACTORS: u32 = 16u;
const TOP_TWO: u32 = 32u;
const MOST: u32 = 1024u; // experts
const MOST_GROUPS: u32 = 64u; // as many as there are invocations

var<workgroup> scores: array<f32, MOST>;
var<workgroup> keys: array<u32, MOST>; // by which experts are chosen; 0: it is chosen already, or its group is not
var<workgroup> of_groups: array<f32, MOST_GROUPS>;

fn sigmoid(logit: f32) -> f32 {
    return 1.0 / (1.0 + exp(min(-logit, 88.0)));
}

fn chosen_by(e: u32) -> f32 {
    var score = scores[e];
    if ((params.flags & BIAS) != 0u) {
        score += bias[e];
    }
    return score;
}

// Strikes off the experts of all groups but the best ones; of equal groups the first is better.
fn choose_groups(local: u32) {
    let size = params.n_experts / params.n_groups;
    workgroupBarrier();
    if (local < params.n_groups) {
        var best = vec2<f32>(LOWEST, LOWEST);
        for (var e = local * size; e < (local + 1u) * size; e++) {
            let score = chosen_by(e);
            best = vec2<f32>(max(best.x, score), max(best.y, min(best.x, score)));
        }
        of_groups[local] = select(best.x, best.x + best.y, (params.flags & TOP_TWO) != 0u);
    }
    workgroupBarrier();
    for (var e = local; e < params.n_experts; e += WG) {
        let own = e / size;
        var n_better = 0u;
        for (var g = 0u; g < params.n_groups; g++) {
            if (of_groups[g] > of_groups[own] || (of_groups[g] == of_groups[own] && g < own)) {
                n_better++;
            }
        }
        if (n_better >= params.n_groups_used) {
            keys[e] = 0u;
        }
    }
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
        keys[e] = max(order_key(chosen_by(e)), 1u);
    }
    if (params.n_groups > 1u) {
        choose_groups(local);
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
            let chosen = routes[first + s].x;
            var weight = share * scores[chosen];
            if ((params.flags & FACTORS) != 0u) {
                weight *= factors[chosen];
            }
            routes[first + s].y = bitcast<u32>(weight);
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
