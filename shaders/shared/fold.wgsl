// The number of a workgroup in a grid that the host folded over x and y, because a dimension has 65,535 workgroups at
// most; see `fold` in src/kernels.rs. The last row of the grid may go past the end, so a kernel leaves alone what is not
// there. The result is the same for a whole workgroup, so a barrier may depend on it.

fn group_index(group: vec3<u32>, grid: vec3<u32>) -> u32 {
    return group.y * grid.x + group.x;
}
