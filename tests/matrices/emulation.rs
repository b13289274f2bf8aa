//! Emulates cooperative matrices in shaders, and runs them on an adapter.

use std::fmt::Write as _;

use tilewright::shaders;
use wgpu::util::DeviceExt;

use crate::common;

/// Rows and columns of a matrix.
pub const SIZE: u32 = 4;

/// A variant's source without cooperative matrices, for subgroups of 8 or 16 invocations. `arrays` lists the arrays
/// that matrices are loaded from and stored to: name, number type, and numbers per element.
///
/// An invocation holds a row of a left matrix, one or two columns of a right one, and the elements of the sum where
/// they meet. All numbers are f32, whatever their type.
pub fn emulated(label: &str, subgroup: u32, arrays: &[(&str, &str, u32)]) -> String {
    let mut variants = shaders::ALL.iter().flat_map(|kernel| kernel.variants.iter());
    let variant = variants.find(|v| v.label == label).expect("the variant exists");
    let size = variant.tier.matrix_size().expect("a tier with matrices");
    let matrix = format!("coop_mat{size}x{size}");
    let (right, sum, product) = match SIZE * SIZE / subgroup {
        1 => ("vec4<f32>", "f32", "dot(a, b)"),
        _ => ("mat2x4<f32>", "vec2<f32>", "a * b"),
    };
    let source = variant.source();
    // Comments may name operations.
    let mut source: String = source.lines().flat_map(|line| [line.split("//").next().unwrap_or(line), "\n"]).collect();
    for (from, to) in [
        ("enable wgpu_cooperative_matrix;".into(), String::new()),
        (format!("const SIZE: u32 = {size}u;"), format!("const SIZE: u32 = {SIZE}u;")),
        (format!("alias Left = {matrix}<f16, A>;"), "alias Left = vec4<f32>;".into()),
        (format!("alias Right = {matrix}<f16, B>;"), format!("alias Right = {right};")),
        (format!("alias Sum = {matrix}<f32, C>;"), format!("alias Sum = {sum};")),
        ("coopMultiplyAdd(".into(), "multiply_add(".into()),
    ] {
        assert!(source.contains(&from), "no `{from}` in the shader");
        source = source.replace(&from, &to);
    }
    // `&array[index], stride` becomes `index, stride` of a function for the array.
    for (array, number, per) in arrays {
        let element = format!("&{array}[");
        for (call, name) in [
            ("coopLoadT<Left>(", format!("left_of_{array}(")),
            ("coopLoad<Right>(", format!("right_of_{array}(")),
            ("coopLoadT<Sum>(", format!("sum_of_{array}(")),
        ] {
            source = source.replace(&format!("{call}{element}"), &format!("{name}["));
        }
        let mut rest = source.as_str();
        let mut stored = String::new();
        while let Some((before, call)) = rest.split_once("coopStoreT(") {
            let (value, index) = call.split_once(", ").expect("a value");
            match index.strip_prefix(&element) {
                Some(index) => {
                    let _ = write!(stored, "{before}sum_into_{array}({value}, [");
                    rest = index;
                }
                None => {
                    let _ = write!(stored, "{before}coopStoreT(");
                    rest = call;
                }
            }
        }
        source = unbracketed(&(stored + rest));
        source += &functions(array, number, *per, SIZE * SIZE / subgroup, &source);
    }
    assert!(!source.contains("coop"), "an operation has no emulation");
    let (head, body) = source.split_once("@compute").expect("an entry point");
    let (entry, body) = body.split_once(") {\n").expect("a function body");
    let columns = SIZE * SIZE / subgroup;
    format!(
        "{head}var<private> own_row: u32 = 0u;
var<private> own_column: u32 = 0u;
@compute{entry}) {{
    own_row = local % {subgroup}u * {columns}u / 4u;
    own_column = local % {subgroup}u * {columns}u % 4u;
{body}
fn multiply_add(a: Left, b: Right, c: Sum) -> Sum {{
    return {product} + c;
}}
"
    )
}

/// The source with `([index]` replaced by `(index)`, and `, [index]` by `, index`.
fn unbracketed(source: &str) -> String {
    let mut out = String::with_capacity(source.len());
    let mut rest = source;
    while let Some(at) = ["([", ", ["].iter().filter_map(|mark| Some(rest.find(mark)? + mark.len() - 1)).min() {
        out.push_str(&rest[..at]);
        let mut depth = 0;
        let end = rest[at..].find(|c| {
            depth += i32::from(c == '[') - i32::from(c == ']');
            depth == 0
        });
        let end = at + end.expect("a closing bracket");
        out.push_str(&rest[at + 1..end]);
        rest = &rest[end + 1..];
    }
    out + rest
}

/// Functions that load matrices from an array and store them there, if the source uses them.
fn functions(array: &str, number: &str, per: u32, columns: u32, source: &str) -> String {
    // A row in memory, and an element.
    let (row, element): (_, fn(&str) -> String) = match per {
        4 => (format!("vec4<f32>({array}[at])"), |i| format!("[at][own_column + {i}]")),
        _ => {
            let numbers: Vec<String> = (0..4).map(|i| format!("f32({array}[at + {i}u])")).collect();
            (format!("vec4<f32>({})", numbers.join(", ")), |i| format!("[at + own_column + {i}]"))
        }
    };
    let row_at = |index: &str| format!("row_of_{array}({index})");
    let (right, sum, value): (_, _, [&str; 2]) = match columns {
        1 => (row_at("at + own_column * stride"), format!("{array}{}", element("0u")), ["sum", ""]),
        _ => {
            let rows = ["own_column", "(own_column + 1u)"].map(|column| row_at(&format!("at + {column} * stride")));
            let sums = ["0u", "1u"].map(|i| format!("{array}{}", element(i)));
            (format!("Right({})", rows.join(", ")), format!("Sum({})", sums.join(", ")), ["sum.x", "sum.y"])
        }
    };
    let stores: String = (value.iter().zip(["0u", "1u"]).filter(|(value, _)| !value.is_empty()))
        .map(|(value, i)| format!("{array}{} = {number}({value}); ", element(i)))
        .collect();
    let at = "let at = first + own_row * stride;";
    [
        (format!("row_of_{array}("), format!("fn row_of_{array}(at: u32) -> vec4<f32> {{ return {row}; }}")),
        (
            format!("left_of_{array}("),
            format!("fn left_of_{array}(first: u32, stride: u32) -> Left {{ {at} return {}; }}", row_at("at")),
        ),
        (
            format!("right_of_{array}("),
            format!("fn right_of_{array}(at: u32, stride: u32) -> Right {{ return {right}; }}"),
        ),
        (
            format!("sum_of_{array}("),
            format!("fn sum_of_{array}(first: u32, stride: u32) -> Sum {{ {at} return {sum}; }}"),
        ),
        (
            format!("sum_into_{array}("),
            format!("fn sum_into_{array}(sum: Sum, first: u32, stride: u32) {{ {at} {stores} }}"),
        ),
    ]
    .into_iter()
    .filter(|(call, _)| source.contains(call.as_str()) || call.starts_with("row_of"))
    .map(|(_, text)| text + "\n")
    .collect()
}

/// A device with f16.
pub struct Gpu {
    device: wgpu::Device,
    queue: wgpu::Queue,
}

impl Gpu {
    pub fn open() -> Option<Gpu> {
        let instance = wgpu::Instance::new(wgpu::InstanceDescriptor::new_without_display_handle());
        let adapter = pollster::block_on(instance.enumerate_adapters(wgpu::Backends::PRIMARY))
            .into_iter()
            .find(|adapter| adapter.features().contains(wgpu::Features::SHADER_F16));
        let Some(adapter) = adapter else {
            assert!(std::env::var_os("REQUIRE_ADAPTER").is_none(), "REQUIRE_ADAPTER is set and no adapter has f16");
            common::skip_part("no adapter with shader-f16");
            return None;
        };
        let required_limits = wgpu::Limits { max_compute_workgroup_storage_size: 32 << 10, ..Default::default() };
        let descriptor = wgpu::DeviceDescriptor {
            required_features: wgpu::Features::SHADER_F16,
            required_limits: required_limits.or_worse_values_from(&adapter.limits()),
            ..Default::default()
        };
        let (device, queue) = pollster::block_on(adapter.request_device(&descriptor)).expect("the device opens");
        Some(Gpu { device, queue })
    }

    pub fn module(&self, source: String) -> wgpu::ShaderModule {
        let source = wgpu::ShaderSource::Wgsl(source.into());
        self.device.create_shader_module(wgpu::ShaderModuleDescriptor { label: None, source })
    }

    pub fn pipeline(&self, module: &wgpu::ShaderModule, constants: &[(&str, f64)]) -> wgpu::ComputePipeline {
        self.device.create_compute_pipeline(&wgpu::ComputePipelineDescriptor {
            label: None,
            layout: None,
            module,
            entry_point: None,
            compilation_options: wgpu::PipelineCompilationOptions { constants, ..Default::default() },
            cache: None,
        })
    }

    /// Contents of `y`, which is bound last, after a run.
    pub fn run(
        &self,
        pipeline: &wgpu::ComputePipeline,
        params: &[u32],
        operands: &[&[u8]],
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
        buffers.extend(operands.iter().map(|operand| buffer(operand, storage)));
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
        device.poll(wgpu::PollType::wait_indefinitely()).expect("the queue drains");
        bytemuck::cast_slice(&read.get_mapped_range(..).expect("the result is mapped")).to_vec()
    }
}
