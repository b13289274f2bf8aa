// An invocation's part of the products of four rows of w with one x: LANES of them share the blocks of K.
//
// An invocation multiplies whole blocks, and its neighbours the blocks beside. If each read its own part of x, a load would go
// to as many cache lines as there are invocations: on an H100 that took most of the time. So a workgroup reads CHUNK blocks
// of x side by side into workgroup memory, where the first quads of all blocks are neighbours, then the second ones, and so on.
//
// Of types whose blocks are nothing but weights in PARTS loads of 16 bytes, neighbours take the parts of a block, so that
// they read weights side by side, too.
//
// The importer says by NORM and `weighed` what x is taken times.
#import row_block

override PARTS: u32 = 1u; // 4 with F16 and BF16, 8 with F32
override PART_QUADS: u32 = 8u / PARTS;

const CHUNK: u32 = 64u;
const X_STRIDE: u32 = CHUNK + 1u; // odd, so that the quads of a block are in different banks
const X_QUADS: u32 = 8u * X_STRIDE; // WG and more, so that sums find room there later

// Products of a part of four blocks of w, with block `at` of x.
fn part_dots(blocks: vec4<u32>, part: u32, at: u32) -> vec4<f32> {
    var sum = vec4<f32>();
    for (var i = 0u; i < PART_QUADS; i++) {
        let quad = part * PART_QUADS + i;
        let value = partial[quad * X_STRIDE + at];
        sum += vec4<f32>(
            dot(block_quad(blocks.x, quad), value),
            dot(block_quad(blocks.y, quad), value),
            dot(block_quad(blocks.z, quad), value),
            dot(block_quad(blocks.w, quad), value),
        );
    }
    return sum;
}

// All invocations must call it, and pass a barrier before they put sums where x was. With NORM, adds the squares of what
// this one read of x.
fn rows_part(local: u32, rows: vec4<u32>, token: u32, squares: ptr<function, f32>) -> vec4<f32> {
    let row = rows * params.blocks;
    let quads = params.dim / 4u;
    var sum = vec4<f32>();
    for (var first = 0u; first < params.blocks; first += CHUNK) {
        // Whoever calls it again must not write what others still read.
        workgroupBarrier();
        let n_blocks = min(CHUNK, params.blocks - first);
        for (var i = local; i < n_blocks * 8u; i += WG) {
            let quad = first * 8u + i;
            var value = x_of_row(token, quad, quads);
            if (NORM) {
                *squares += dot(value, value);
                value = weighed(value, within_row(quad, quads));
            }
            partial[i % 8u * X_STRIDE + i / 8u] = value;
        }
        workgroupBarrier();
        if (PARTS > 1u) {
            for (var i = local % LANES; i < n_blocks * PARTS; i += LANES) {
                let at = i / PARTS;
                sum += part_dots(row + first + at, i % PARTS, at);
            }
            continue;
        }
        for (var at = local % LANES; at < n_blocks; at += LANES) {
            var part = array<vec4<f32>, 8>();
            for (var i = 0u; i < 8u; i++) {
                part[i] = partial[i * X_STRIDE + at];
            }
            sum += block_dots(row + first + at, part);
        }
    }
    return sum;
}
