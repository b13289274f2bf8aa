//! The index arithmetic of tiles of cooperative matrices, which few adapters have: the shader as it is, but with matrices of
//! 4 x 4 numbers that each invocation multiplies by itself. All numbers are small integers, so results are exact.

#![cfg(not(target_arch = "wasm32"))]

use half::f16;
use tilewright::shaders;
use wgpu::util::DeviceExt;

mod common;

const BIAS: u32 = 1;
const ACCUMULATE: u32 = 2;
/// Rows and columns of a matrix.
const SIZE: u32 = 4;
/// Invocations of what stands for a subgroup.
const SUBGROUP: u32 = 8;

/// The linked shader without cooperative matrices.
fn emulated() -> String {
    let kernel = shaders::ALL.iter().find(|kernel| kernel.name == "matmul_half").expect("the kernel is there");
    let variant = kernel.variants.iter().find(|v| v.label == "matmul_half.F32.matrix16").expect("the variant is there");
    let mut source = variant.source();
    for (from, to) in [
        ("enable wgpu_cooperative_matrix;", ""),
        ("const SIZE: u32 = 16u;", "const SIZE: u32 = 4u;"),
        ("alias Left = coop_mat16x16<f16, A>;", "alias Left = mat4x4<f32>;"),
        ("alias Right = coop_mat16x16<f16, B>;", "alias Right = mat4x4<f32>;"),
        ("alias Sum = coop_mat16x16<f32, C>;", "alias Sum = mat4x4<f32>;"),
        ("coopLoadT<Left>(&staged[", "load_left("),
        ("coopLoad<Right>(&staged[", "load_right("),
        ("coopLoadT<Sum>(&y[", "load_y("),
        ("coopStoreT(sum, &sums[", "stage_sum(sum, "),
        ("coopStoreT(sum, &y[", "store_y(sum, "),
        ("coopStoreT(total, &y[", "store_y(total, "),
        ("coopMultiplyAdd(", "multiply_add("),
    ] {
        assert!(source.contains(from), "no `{from}` in the shader");
        source = source.replace(from, to);
    }
    // What is left of `&array[index], stride`.
    source = source.replace("], STRIDE", ", STRIDE").replace("], SIZE)", ", SIZE)").replace("], stride)", ", stride)");
    assert!(!source.contains("coop"), "an operation has no emulation");
    source
        + "
// Rows of `staged` are rows of the left matrix, quads apart.
fn load_left(at: u32, stride: u32) -> Left {
    return transpose(load_right(at, stride));
}
// And columns of the right one.
fn load_right(at: u32, stride: u32) -> Right {
    return mat4x4<f32>(vec4<f32>(staged[at]), vec4<f32>(staged[at + stride]), vec4<f32>(staged[at + 2u * stride]),
        vec4<f32>(staged[at + 3u * stride]));
}
fn multiply_add(a: Left, b: Right, c: Sum) -> Sum {
    return a * b + c;
}
fn load_y(at: u32, stride: u32) -> Sum {
    var sum = Sum();
    for (var i = 0u; i < 16u; i++) {
        sum[i % 4u][i / 4u] = y[at + i / 4u * stride + i % 4u];
    }
    return sum;
}
// All invocations of a subgroup have the same; one of them stores it.
fn store_y(value: Sum, at: u32, stride: u32) {
    var sum = value;
    for (var i = 0u; i < 16u && lane == 0u; i++) {
        y[at + i / 4u * stride + i % 4u] = sum[i % 4u][i / 4u];
    }
}
fn stage_sum(value: Sum, at: u32, stride: u32) {
    var sum = value;
    for (var i = 0u; i < 16u && lane == 0u; i++) {
        sums[at + i / 4u * stride + i % 4u] = sum[i % 4u][i / 4u];
    }
}
"
}

/// A product and how it is taken.
#[derive(Clone, Copy, Debug)]
struct Case {
    /// Of a tile, and subgroups side by side.
    tile: [u32; 3],
    sizes: [u32; 3],
    flags: u32,
    guarded: bool,
    /// Whether a row is times a power of two.
    scaled: bool,
    n_splits: u32,
}

#[test]
fn tiles_of_matrices_read_and_write_what_they_should() {
    let Some(gpu) = Gpu::open() else { return };
    // As `ProductPlan` has them, in matrices of four.
    let tiles = [[4, 64, 4], [8, 32, 4], [16, 16, 2], [32, 32, 2]];
    for tile in tiles {
        let [rows, cols, _] = tile;
        let exact =
            Case { tile, sizes: [2 * rows, 2 * cols, 96], flags: 0, guarded: false, scaled: false, n_splits: 1 };
        let ragged = Case { sizes: [2 * rows - 1, cols + 5, 64], guarded: true, ..exact };
        let cases = [
            exact,
            Case { flags: ACCUMULATE, ..exact },
            Case { flags: BIAS, ..exact },
            Case { scaled: true, ..exact },
            Case { scaled: true, flags: ACCUMULATE | BIAS, ..exact },
            Case { n_splits: 2, ..exact },
            ragged,
            Case { flags: ACCUMULATE | BIAS, scaled: true, ..ragged },
            Case { sizes: [1, 1, 32], ..ragged },
        ];
        for guarded in [false, true] {
            let pipeline = gpu.pipeline(tile, guarded);
            cases.iter().filter(|case| case.guarded == guarded).for_each(|&case| gpu.check(&pipeline, case));
        }
    }
}

struct Gpu {
    device: wgpu::Device,
    queue: wgpu::Queue,
    module: wgpu::ShaderModule,
}

impl Gpu {
    fn open() -> Option<Gpu> {
        let instance = wgpu::Instance::new(wgpu::InstanceDescriptor::new_without_display_handle());
        let adapter = pollster::block_on(instance.enumerate_adapters(wgpu::Backends::PRIMARY))
            .into_iter()
            .find(|adapter| adapter.features().contains(wgpu::Features::SHADER_F16));
        let Some(adapter) = adapter else {
            assert!(std::env::var_os("REQUIRE_ADAPTER").is_none(), "REQUIRE_ADAPTER is set and no adapter has f16");
            common::skip_part("no adapter with shader-f16");
            return None;
        };
        let descriptor = wgpu::DeviceDescriptor { required_features: wgpu::Features::SHADER_F16, ..Default::default() };
        let (device, queue) = pollster::block_on(adapter.request_device(&descriptor)).expect("the device opens");
        // A name for the invocation that writes.
        let source = emulated().replacen("fn matmul_half(", "fn matmul_half_of(", 1);
        let (head, body) = source.split_once("@compute").expect("an entry point");
        let body = body.replacen("let across", "lane = local % SUBGROUP;\n    let across", 1);
        let source = format!("{head}var<private> lane: u32 = 0u;\n@compute{body}");
        let module = device.create_shader_module(wgpu::ShaderModuleDescriptor {
            label: None,
            source: wgpu::ShaderSource::Wgsl(source.into()),
        });
        Some(Gpu { device, queue, module })
    }

    fn pipeline(&self, [rows, cols, across]: [u32; 3], guarded: bool) -> wgpu::ComputePipeline {
        assert!(rows.is_multiple_of(SIZE) && cols.is_multiple_of(SIZE * across));
        let constants = [
            ("ROWS", f64::from(rows)),
            ("COLS", f64::from(cols)),
            ("ACROSS", f64::from(across)),
            ("SUBGROUP", f64::from(SUBGROUP)),
            ("GUARDED", f64::from(u8::from(guarded))),
        ];
        self.device.create_compute_pipeline(&wgpu::ComputePipelineDescriptor {
            label: None,
            layout: None,
            module: &self.module,
            entry_point: None,
            compilation_options: wgpu::PipelineCompilationOptions { constants: &constants, ..Default::default() },
            cache: None,
        })
    }

    /// Runs a case and compares all of `y`.
    fn check(&self, pipeline: &wgpu::ComputePipeline, case: Case) {
        let Case { tile: [rows, cols, _], sizes: [m, n, k], flags, scaled, n_splits, .. } = case;
        let (y_start, y_stride) = (4, n.next_multiple_of(4) + 8);
        let blocks = k / 32;
        let width = k.next_multiple_of(256);
        let integer = |i: u32, seed: u32| f64::from((i.wrapping_mul(2_654_435_761).wrapping_add(seed) >> 20) % 7) - 3.0;
        let x = |row: u32, i: u32| integer(row * k + i, 1);
        let w = |col: u32, i: u32| integer(col * k + i, 2);
        let exponent = |row: u32| if scaled && row.is_multiple_of(3) { 2.0 } else { 1.0 };
        let held = |i: u32| integer(i, 3);
        let bias = |i: u32| integer(i, 4);

        let mut halves = vec![f16::ZERO; (m * width) as usize];
        for (row, halves) in halves.chunks_exact_mut(width as usize).enumerate() {
            (0..k).for_each(|i| halves[i as usize] = f16::from_f64(x(row as u32, i) * exponent(row as u32)));
        }
        let weights: Vec<f32> = (0..n * k).map(|i| w(i / k, i % k) as f32).collect();
        let inverse: Vec<f32> = (0..m).map(|row| (1.0 / exponent(row)) as f32).collect();
        let biases: Vec<f32> = (0..y_stride).map(|i| bias(i) as f32).collect();
        let before: Vec<f32> = (0..n_splits * m * y_stride).map(|i| held(i) as f32).collect();
        let split_blocks = blocks.div_ceil(n_splits);
        let params = [m, n, width, blocks, n * blocks * 32, y_start, y_stride, flags, 0, split_blocks, 0, 0];

        let mut want: Vec<f64> = before.iter().map(|&v| f64::from(v)).collect();
        for split in 0..n_splits {
            let along = split * split_blocks * 32..k.min((split + 1) * split_blocks * 32);
            for (row, col) in (0..m).flat_map(|row| (0..n).map(move |col| (row, col))) {
                let at = ((split * m + row) * y_stride + y_start + col) as usize;
                let mut sum: f64 = along.clone().map(|i| x(row, i) * w(col, i)).sum();
                sum += if flags & BIAS != 0 { bias(y_start + col) } else { 0.0 };
                want[at] = sum + if flags & ACCUMULATE != 0 { want[at] } else { 0.0 };
            }
        }
        let grid = [m.div_ceil(rows) * n.div_ceil(cols), 1, n_splits];
        let halves: Vec<u16> = halves.iter().map(|half| half.to_bits()).collect();
        let operands = [
            bytemuck::cast_slice(&weights),
            bytemuck::cast_slice(&biases),
            bytemuck::cast_slice(&halves),
            bytemuck::cast_slice(&inverse),
        ];
        let found = self.run(pipeline, &params, operands, &before, grid);
        for (i, (found, want)) in found.iter().zip(&want).enumerate() {
            let (row, col) = (i as u32 / y_stride, i as u32 % y_stride);
            assert_eq!(f64::from(*found), *want, "{case:?}: row {row} of y, column {col}");
        }
    }

    fn run(
        &self,
        pipeline: &wgpu::ComputePipeline,
        params: &[u32; 12],
        operands: [&[u8]; 4],
        y: &[f32],
        grid: [u32; 3],
    ) -> Vec<f32> {
        let device = &self.device;
        let buffer = |contents: &[u8], usage| {
            device.create_buffer_init(&wgpu::util::BufferInitDescriptor { label: None, contents, usage })
        };
        let storage = wgpu::BufferUsages::STORAGE;
        let result = buffer(bytemuck::cast_slice(y), storage | wgpu::BufferUsages::COPY_SRC);
        let mut buffers = vec![buffer(bytemuck::cast_slice(params), wgpu::BufferUsages::UNIFORM)];
        buffers.extend(operands.map(|operand| buffer(operand, storage)));
        buffers.push(result.clone());
        let entries: Vec<wgpu::BindGroupEntry<'_>> = (0..)
            .zip(&buffers)
            .map(|(binding, buffer)| wgpu::BindGroupEntry { binding, resource: buffer.as_entire_binding() })
            .collect();
        let layout = pipeline.get_bind_group_layout(0);
        let group =
            device.create_bind_group(&wgpu::BindGroupDescriptor { label: None, layout: &layout, entries: &entries });
        let read = device.create_buffer(&wgpu::BufferDescriptor {
            label: None,
            size: result.size(),
            usage: wgpu::BufferUsages::MAP_READ | wgpu::BufferUsages::COPY_DST,
            mapped_at_creation: false,
        });
        let mut encoder = device.create_command_encoder(&Default::default());
        let mut pass = encoder.begin_compute_pass(&Default::default());
        pass.set_pipeline(pipeline);
        pass.set_bind_group(0, &group, &[]);
        pass.dispatch_workgroups(grid[0], grid[1], grid[2]);
        drop(pass);
        encoder.copy_buffer_to_buffer(&result, 0, &read, 0, result.size());
        self.queue.submit([encoder.finish()]);
        read.map_async(wgpu::MapMode::Read, .., |outcome| outcome.expect("the result is read"));
        device.poll(wgpu::PollType::wait_indefinitely()).expect("the queue ends");
        bytemuck::cast_slice(&read.get_mapped_range(..).expect("the result is mapped")).to_vec()
    }
}
