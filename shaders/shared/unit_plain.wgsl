// Matrices of 8 x 8, element by element, for `probe_matrix`.
const SIZE: u32 = 8u;

fn multiply(local: u32, first: u32) {
    for (var at = local % SUBGROUP; at < 8u * SQUARE; at += SUBGROUP) {
        let pair = at / SQUARE;
        let row = (pair / 4u) * SQUARE + (at % SQUARE) / SIZE * SIZE;
        let column = (2u + pair % 4u) * SQUARE + at % SIZE;
        var sum = 0.0;
        for (var round = 0u; round < params.rounds; round++) {
            for (var k = 0u; k < SIZE; k++) {
                sum += x[row + k] * x[column + k * SIZE];
            }
        }
        y[first + at] = sum;
    }
}
