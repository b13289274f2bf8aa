// Late interaction: how well a document's tokens answer those of a query. Of the similarities of all queries' tokens
// with all documents' tokens,
//
//     scores[b, first + i] = sum over r of max over c of x[r, c],   r in query b, c in document i
//
// where an empty query or document gives zero. Sixteen invocations have a quad of rows and walk the columns together;
// then one of them for each row takes their maxima. A score depends neither on where the document lies nor on others.
// Dispatch (B I folded over x and y). Khattab & Zaharia 2020, arXiv:2004.12832.
#import fold

struct Params {
    n_rows: u32, n_cols: u32, n_queries: u32, n_documents: u32, // R, C, B, I
    first: u32, n_scores: u32, _pad0: u32, _pad1: u32,          // first column, N
}
@group(0) @binding(0) var<uniform> params: Params;
@group(0) @binding(1) var<storage, read> query_spans: array<vec2<u32>>;   // [B, 2]: first and end row
@group(0) @binding(2) var<storage, read> document_spans: array<vec2<u32>>; // [I, 2]: first and end column
@group(0) @binding(3) var<storage, read> x: array<f32>;               // [R, C]
@group(0) @binding(4) var<storage, read_write> scores: array<f32>;    // [B, N]

const WG: u32 = 64u;
const LANES: u32 = 16u; // that share four rows
const ROWS: u32 = 16u;  // that the workgroup has at a time
const LOWEST: f32 = -3.4028234e38;

var<workgroup> highest: array<vec4<f32>, WG>;
var<workgroup> sums: array<f32, WG>;

@compute @workgroup_size(WG)
fn max_sim(
    @builtin(workgroup_id) group: vec3<u32>,
    @builtin(num_workgroups) grid: vec3<u32>,
    @builtin(local_invocation_index) local: u32,
) {
    let index = group_index(group, grid);
    if (index >= params.n_queries * params.n_documents) {
        return;
    }
    let query = index / params.n_documents;
    let document = index % params.n_documents;
    let end = min(query_spans[query].y, params.n_rows);
    let first = min(query_spans[query].x, end);
    let last_col = min(document_spans[document].y, params.n_cols);
    let first_col = min(document_spans[document].x, last_col);
    let lane = local % LANES;
    let four = local / LANES * 4u;
    var sum = 0.0;
    for (var start = first; start < end; start += ROWS) {
        // Rows past the end repeat the last one.
        let rows = min(vec4<u32>(start + four) + vec4<u32>(0u, 1u, 2u, 3u), vec4<u32>(end - 1u)) * params.n_cols;
        var best = vec4<f32>(LOWEST);
        for (var c = first_col + lane; c < last_col; c += LANES) {
            best = max(best, vec4<f32>(x[rows.x + c], x[rows.y + c], x[rows.z + c], x[rows.w + c]));
        }
        highest[local] = best;
        workgroupBarrier();
        if (lane < 4u && start + four + lane < end) {
            var row_best = LOWEST;
            for (var i = 0u; i < LANES; i++) {
                row_best = max(row_best, highest[local / LANES * LANES + i][lane]);
            }
            sum += row_best;
        }
        workgroupBarrier(); // it is overwritten
    }
    sums[local] = select(0.0, sum, first_col < last_col);
    workgroupBarrier();
    if (local == 0u) {
        var total = 0.0;
        for (var i = 0u; i < WG; i++) {
            total += sums[i];
        }
        scores[query * params.n_scores + params.first + document] = total;
    }
}
