// Products of each head with a matrix of its own, for one token or many:
//
//     y[t, h, n] = sum over k of x[t, h, k] * w[h, n, k],   with TRANSPOSED of x[t, h, k] * w[h, k, n]
//
// where a matrix is some of the rows that w has for its head. With LATENT, y are the heads of multi-head latent attention
// (DeepSeek-AI 2024, arXiv:2405.04434), where keys are the same for all heads and hold their values: a query is its R elements
// to be rotated, which follow those of its product, and then the product; after the queries comes the token's key, the R
// elements to be rotated and the normalised latent:
//
//     y[t, h] = x[t, h, K ..] | products;   y[t, H] = kv[t, N ..] | norm[n] * kv[t, n] / sqrt(mean over n of kv[t, n]^2 + eps)
//
// An invocation has one n and TOKENS tokens, so that it unpacks weights once for all of them; a workgroup of its own has a
// token's key. Dispatch (outputs of TOKENS tokens, then keys, folded over x and y).
#weights
#import reduce t0=reduce t2=reduce_subgroup
#import fold

struct Params {
    n_tokens: u32, n_heads: u32, n_out: u32, dim: u32, // T, H, N, K
    blocks: u32, w_scales: u32, w_rows: u32, w_start: u32, // rows of w for a head, and the first one of its matrix
    x_stride: u32, x_start: u32, x_head: u32, n_turned: u32, // R; 0 without LATENT
    kv_stride: u32, kv_start: u32, eps: f32, y_stride: u32,
}
@group(0) @binding(0) var<uniform> params: Params;
@group(0) @binding(1) var<storage, read> w: array<vec4<u32>>;  // [H w_rows, K] or transposed [H w_rows, N], packed
@group(0) @binding(2) var<storage, read> x: array<vec4<f32>>;  // [T, x_stride], from column x_start on heads x_head apart
@group(0) @binding(3) var<storage, read> kv: array<f32>;       // [T, kv_stride], from column kv_start on; any buffer without LATENT
@group(0) @binding(4) var<storage, read> norm: array<f32>;     // [N]; any buffer without LATENT
@group(0) @binding(5) var<storage, read_write> y: array<f32>;  // [T, y_stride], heads of R + N elements

const WG: u32 = 64u;
const TOKENS: u32 = 4u;
override TRANSPOSED: bool = false;
override LATENT: bool = false;

@compute @workgroup_size(WG)
fn head_matmul(
    @builtin(workgroup_id) group: vec3<u32>,
    @builtin(num_workgroups) grid: vec3<u32>,
    @builtin(local_invocation_index) local: u32,
) {
    let width = params.n_turned + params.n_out;
    let outputs = params.n_heads * width * ((params.n_tokens + TOKENS - 1u) / TOKENS);
    let n_groups = (outputs + WG - 1u) / WG;
    let index = group_index(group, grid);
    if (LATENT && index >= n_groups) {
        if (index - n_groups < params.n_tokens) {
            put_key(local, index - n_groups);
        }
        return;
    }
    let id = index * WG + local;
    if (id >= outputs) {
        return;
    }
    let n = id % width;
    let head = id / width % params.n_heads;
    let first = id / width / params.n_heads * TOKENS;
    // Tokens past the end repeat the last one.
    let tokens = min(vec4<u32>(first, first + 1u, first + 2u, first + 3u), vec4<u32>(params.n_tokens - 1u));
    let at = tokens * params.x_stride + params.x_start + head * params.x_head;
    var sums = vec4<f32>();
    if (n < params.n_turned) {
        let turned = at + params.dim + n;
        sums = vec4<f32>(x_at(turned.x), x_at(turned.y), x_at(turned.z), x_at(turned.w));
    } else if (TRANSPOSED) {
        sums = column(head * params.w_rows + params.w_start, n - params.n_turned, at);
    } else {
        sums = row(head * params.w_rows + params.w_start + n - params.n_turned, at / 4u);
    }
    for (var i = 0u; i < min(TOKENS, params.n_tokens - first); i++) {
        y[(first + i) * params.y_stride + head * width + n] = sums[i];
    }
}

fn x_at(element: u32) -> f32 {
    return x[element / 4u][element % 4u];
}

// Products of a row of w with four rows of x, which begin at these quads.
fn row(n: u32, at: vec4<u32>) -> vec4<f32> {
    var sums = vec4<f32>();
    for (var quad = 0u; quad < params.dim / 4u; quad++) {
        let weights = block_quad(n * params.blocks + quad / 8u, quad % 8u);
        sums += vec4<f32>(
            dot(weights, x[at.x + quad]), dot(weights, x[at.y + quad]), dot(weights, x[at.z + quad]), dot(weights, x[at.w + quad]),
        );
    }
    return sums;
}

// Products of column `n` of K rows of w with four rows of x, which begin at these elements.
fn column(first_row: u32, n: u32, at: vec4<u32>) -> vec4<f32> {
    var sums = vec4<f32>();
    for (var k = 0u; k < params.dim; k++) {
        let weight = block_quad((first_row + k) * params.blocks + n / 32u, n / 4u % 8u)[n % 4u];
        sums += weight * vec4<f32>(x_at(at.x + k), x_at(at.y + k), x_at(at.z + k), x_at(at.w + k));
    }
    return sums;
}

fn put_key(local: u32, token: u32) {
    let at = token * params.kv_stride + params.kv_start;
    let to = token * params.y_stride + params.n_heads * (params.n_turned + params.n_out);
    var squares = 0.0;
    for (var n = local; n < params.n_out; n += WG) {
        squares += kv[at + n] * kv[at + n];
    }
    let scale = 1.0 / sqrt(workgroup_sum(local, squares) / f32(params.n_out) + params.eps);
    for (var n = local; n < params.n_turned; n += WG) {
        y[to + n] = kv[at + params.n_out + n];
    }
    for (var n = local; n < params.n_out; n += WG) {
        y[to + params.n_turned + n] = kv[at + n] * scale * norm[n];
    }
}
