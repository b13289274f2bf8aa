//! SPIR-V to CUDA C++, so that NVIDIA's compiler sees the code that its Vulkan driver gets.
//!
//! Instruction by instruction: a component is a variable, a block a label, a branch a `goto`. Calls are inlined, as the
//! drivers do. Nothing is optimised here. Storage buffers are parameters, workgroup memory is `__shared__`, the uniform
//! buffer is in constant memory. What the driver adds to keep accesses within their buffers is missing.

use std::collections::{HashMap, HashSet};
use std::fmt::Write as _;

use spirv::{BuiltIn, Decoration, ExecutionMode, GlslStd450Op, GroupOperation, Op, StorageClass};

/// The functions that instructions become where C++ has no operator.
const PREAMBLE: &str = include_str!("preamble.cu");

/// The kernel's name in the translation.
pub const KERNEL: &str = "kernel";

type Id = u32;
type Words<'a> = &'a [u32];

/// The module as CUDA C++, with one kernel.
pub fn translate(words: Words) -> Result<String, String> {
    let module = Module::read(words)?;
    let mut writer =
        Writer { module: &module, globals: HashMap::new(), head: String::new(), body: String::new(), n_names: 0 };
    let (parameters, shared) = writer.variables()?;
    writer.call(module.entry, Vec::new())?;
    let Writer { head, body, .. } = writer;
    let threads: u32 = module.local_size.iter().product();
    Ok(format!(
        "{PREAMBLE}\n{shared}extern \"C\" __global__ void __launch_bounds__({threads}) {KERNEL}({parameters}) {{\n{head}{body}}}\n"
    ))
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Scalar {
    Bool,
    /// Signs are a matter of instructions.
    Int {
        bytes: u32,
    },
    F32,
    F16,
}

impl Scalar {
    fn name(self) -> &'static str {
        match self {
            Scalar::Bool => "bool",
            Scalar::Int { bytes: 1 } => "unsigned char",
            Scalar::Int { bytes: 2 } => "unsigned short",
            Scalar::Int { bytes: 8 } => "unsigned long long",
            Scalar::Int { .. } => "unsigned",
            Scalar::F32 => "float",
            Scalar::F16 => "half",
        }
    }

    fn bytes(self) -> u32 {
        match self {
            Scalar::Bool | Scalar::F32 => 4,
            Scalar::F16 => 2,
            Scalar::Int { bytes } => bytes,
        }
    }

    /// The unsigned integer with the bits of an expression.
    fn to_bits(self, expression: &str) -> String {
        match self {
            Scalar::Bool => format!("({expression} ? 1u : 0u)"),
            Scalar::F32 => format!("__float_as_uint({expression})"),
            Scalar::F16 => format!("{expression}.bits"),
            Scalar::Int { .. } => expression.to_string(),
        }
    }

    fn of_bits(self, bits: &str) -> String {
        match self {
            Scalar::Bool => format!("(({bits}) != 0u)"),
            Scalar::F32 => format!("__uint_as_float({bits})"),
            Scalar::F16 => format!("half{{(unsigned short)({bits})}}"),
            Scalar::Int { .. } => format!("({})({bits})", self.name()),
        }
    }
}

#[derive(Clone, Debug)]
enum Type {
    Void,
    Scalar(Scalar),
    Vector(Id, u32),
    /// Columns.
    Matrix(Id, u32),
    Array(Id, u32),
    RuntimeArray(Id),
    Struct(Vec<Id>),
    Pointer(Id),
    Function,
}

/// Where a variable is.
#[derive(Clone, Debug)]
enum Place {
    /// Bytes of a buffer or of workgroup memory, laid out as declared.
    Bytes { is_buffer: bool },
    /// An array of words, one for each scalar.
    Words,
    /// What an invocation knows of its position.
    Input(BuiltIn),
}

#[derive(Clone, Debug)]
struct Pointer {
    name: String,
    place: Place,
    /// In the units of the place.
    offset: String,
    pointee: Id,
}

#[derive(Clone, Debug)]
enum Value {
    /// Its scalars in order, each a C++ expression without side effects.
    Scalars(Vec<String>),
    Pointer(Pointer),
}

struct Instruction<'a> {
    op: Op,
    operands: Words<'a>,
}

struct Block<'a> {
    label: Id,
    instructions: Vec<Instruction<'a>>,
}

#[derive(Default)]
struct Function<'a> {
    parameters: Vec<Id>,
    result: Id,
    blocks: Vec<Block<'a>>,
}

#[derive(Default)]
struct Module<'a> {
    types: HashMap<Id, Type>,
    constants: HashMap<Id, Value>,
    /// Types of values.
    of: HashMap<Id, Id>,
    /// Value of integer constants, for lengths and members.
    integers: HashMap<Id, u32>,
    variables: Vec<(Id, Id, StorageClass)>,
    functions: HashMap<Id, Function<'a>>,
    entry: Id,
    local_size: [u32; 3],
    offsets: HashMap<(Id, u32), u32>,
    strides: HashMap<Id, u32>,
    bindings: HashMap<Id, u32>,
    builtins: HashMap<Id, BuiltIn>,
    read_only: HashSet<Id>,
}

impl<'a> Module<'a> {
    fn read(words: Words<'a>) -> Result<Module<'a>, String> {
        let mut module = Module::default();
        let mut function = None;
        let mut rest = words.get(5..).ok_or("no module")?;
        while let Some(&first) = rest.first() {
            let instruction = rest.get(..(first >> 16) as usize).filter(|i| !i.is_empty()).ok_or("cut instruction")?;
            rest = &rest[instruction.len()..];
            let op = Op::from_u32(first & 0xffff).ok_or(format!("instruction {}", first & 0xffff))?;
            let operands = &instruction[1..];
            if let [of, id, ..] = *operands
                && module.types.contains_key(&of)
            {
                module.of.insert(id, of);
            }
            match (op, &mut function) {
                (Op::Function, _) => {
                    function = Some((operands[1], Function { result: operands[0], ..Function::default() }))
                }
                (Op::FunctionEnd, found) => {
                    let (id, function) = found.take().ok_or("end of no function")?;
                    module.functions.insert(id, function);
                }
                (Op::FunctionParameter, Some((_, function))) => function.parameters.push(operands[1]),
                (Op::Label, Some((_, function))) => {
                    function.blocks.push(Block { label: operands[0], instructions: Vec::new() });
                }
                (_, Some((_, function))) => {
                    let block = function.blocks.last_mut().ok_or("an instruction before the first label")?;
                    block.instructions.push(Instruction { op, operands });
                }
                (_, None) => module.declare(op, operands)?,
            }
        }
        Ok(module)
    }

    fn declare(&mut self, op: Op, operands: Words) -> Result<(), String> {
        match op {
            Op::EntryPoint => self.entry = operands[1],
            Op::ExecutionMode if operands[1] == ExecutionMode::LocalSize as u32 => {
                self.local_size.copy_from_slice(&operands[2..5]);
            }
            Op::Decorate => {
                let (target, extra) = (operands[0], operands.get(2).copied().unwrap_or_default());
                match Decoration::from_u32(operands[1]) {
                    Some(Decoration::ArrayStride) => {
                        self.strides.insert(target, extra);
                    }
                    Some(Decoration::Binding) => {
                        self.bindings.insert(target, extra);
                    }
                    Some(Decoration::NonWritable) => {
                        self.read_only.insert(target);
                    }
                    Some(Decoration::BuiltIn) => {
                        self.builtins.insert(target, BuiltIn::from_u32(extra).ok_or("unknown builtin")?);
                    }
                    _ => {}
                }
            }
            Op::MemberDecorate if operands[2] == Decoration::Offset as u32 => {
                self.offsets.insert((operands[0], operands[1]), operands[3]);
            }
            Op::TypeVoid => {
                self.types.insert(operands[0], Type::Void);
            }
            Op::TypeBool => {
                self.types.insert(operands[0], Type::Scalar(Scalar::Bool));
            }
            Op::TypeInt => {
                self.types.insert(operands[0], Type::Scalar(Scalar::Int { bytes: operands[1] / 8 }));
            }
            Op::TypeFloat => {
                let scalar = if operands[1] == 16 { Scalar::F16 } else { Scalar::F32 };
                self.types.insert(operands[0], Type::Scalar(scalar));
            }
            Op::TypeVector => {
                self.types.insert(operands[0], Type::Vector(operands[1], operands[2]));
            }
            Op::TypeMatrix => {
                self.types.insert(operands[0], Type::Matrix(operands[1], operands[2]));
            }
            Op::TypeArray => {
                let length = *self.integers.get(&operands[2]).ok_or("a length that is no constant")?;
                self.types.insert(operands[0], Type::Array(operands[1], length));
            }
            Op::TypeRuntimeArray => {
                self.types.insert(operands[0], Type::RuntimeArray(operands[1]));
            }
            Op::TypeStruct => {
                self.types.insert(operands[0], Type::Struct(operands[1..].to_vec()));
            }
            Op::TypePointer => {
                self.types.insert(operands[0], Type::Pointer(operands[2]));
            }
            Op::TypeFunction => {
                self.types.insert(operands[0], Type::Function);
            }
            Op::Variable => {
                let class = StorageClass::from_u32(operands[2]).ok_or("unknown storage class")?;
                self.variables.push((operands[1], operands[0], class));
            }
            Op::Constant
            | Op::ConstantTrue
            | Op::ConstantFalse
            | Op::ConstantComposite
            | Op::ConstantNull
            | Op::Undef => {
                let value = self.constant(op, operands)?;
                self.constants.insert(operands[1], Value::Scalars(value));
            }
            Op::Capability
            | Op::Extension
            | Op::ExtInstImport
            | Op::MemoryModel
            | Op::ExecutionMode
            | Op::MemberDecorate
            | Op::Name
            | Op::MemberName
            | Op::Source
            | Op::String => {}
            other => return Err(format!("{other:?} is not supported")),
        }
        Ok(())
    }

    fn constant(&mut self, op: Op, operands: Words) -> Result<Vec<String>, String> {
        let leaves = self.leaves(operands[0])?;
        Ok(match op {
            Op::ConstantTrue => vec!["true".into()],
            Op::ConstantFalse => vec!["false".into()],
            Op::Constant => {
                self.integers.insert(operands[1], operands[2]);
                vec![leaves[0].of_bits(&format!("{:#x}u", operands[2]))]
            }
            Op::ConstantComposite => {
                let mut all = Vec::new();
                for id in &operands[2..] {
                    match self.constants.get(id) {
                        Some(Value::Scalars(scalars)) => all.extend(scalars.iter().cloned()),
                        _ => return Err("a composite of no constants".into()),
                    }
                }
                all
            }
            _ => leaves.iter().map(|leaf| leaf.of_bits("0u")).collect(),
        })
    }

    fn of(&self, id: Id) -> Result<&Type, String> {
        self.types.get(&id).ok_or_else(|| format!("no type {id}"))
    }

    fn type_of(&self, value: Id) -> Result<Id, String> {
        self.of.get(&value).copied().ok_or_else(|| format!("value {value} has no type"))
    }

    fn pointee(&self, pointer: Id) -> Result<Id, String> {
        match self.of(pointer)? {
            Type::Pointer(to) => Ok(*to),
            other => Err(format!("{other:?} is no pointer")),
        }
    }

    /// The scalars that a value of the type has.
    fn leaves(&self, id: Id) -> Result<Vec<Scalar>, String> {
        Ok(match self.of(id)? {
            Type::Scalar(scalar) => vec![*scalar],
            Type::Vector(of, n) | Type::Matrix(of, n) | Type::Array(of, n) => self.leaves(*of)?.repeat(*n as usize),
            Type::Struct(members) => {
                let mut all = Vec::new();
                for member in members {
                    all.extend(self.leaves(*member)?);
                }
                all
            }
            other => return Err(format!("{other:?} has no value")),
        })
    }

    fn scalar(&self, id: Id) -> Result<Scalar, String> {
        self.leaves(id)?.first().copied().ok_or_else(|| "an empty type".into())
    }

    /// The type and position of a component.
    fn component(&self, id: Id, at: u32) -> Result<Id, String> {
        match self.of(id)? {
            Type::Vector(of, _) | Type::Matrix(of, _) | Type::Array(of, _) | Type::RuntimeArray(of) => Ok(*of),
            Type::Struct(members) => members.get(at as usize).copied().ok_or_else(|| "no such member".into()),
            other => Err(format!("{other:?} has no components")),
        }
    }

    /// Bytes of a type and its alignment, where the module does not say.
    fn extent(&self, id: Id) -> Result<[u32; 2], String> {
        Ok(match self.of(id)? {
            Type::Scalar(scalar) => [scalar.bytes(); 2],
            Type::Vector(of, n) => {
                let bytes = self.scalar(*of)?.bytes();
                [bytes * n, bytes * n.next_power_of_two()]
            }
            Type::Matrix(of, n) | Type::Array(of, n) => {
                let [bytes, align] = self.extent(*of)?;
                [bytes.next_multiple_of(align) * n, align]
            }
            Type::Struct(members) => {
                let mut extent = [0_u32, 1];
                for member in members {
                    let [bytes, align] = self.extent(*member)?;
                    extent = [extent[0].next_multiple_of(align) + bytes, extent[1].max(align)];
                }
                [extent[0].next_multiple_of(extent[1]), extent[1]]
            }
            other => return Err(format!("{other:?} has no size")),
        })
    }

    /// Where member `at` of a struct begins, or what one step of an array is, in units of the place.
    fn step(&self, id: Id, at: u32, place: &Place) -> Result<u32, String> {
        let n_scalars = |id: Id| Ok::<u32, String>(self.leaves(id)?.len() as u32);
        match (self.of(id)?, place) {
            (Type::Struct(members), Place::Bytes { is_buffer: false }) => {
                let mut begin = 0;
                for (i, member) in members.iter().enumerate() {
                    let [bytes, align] = self.extent(*member)?;
                    begin = u32::next_multiple_of(begin, align);
                    if i as u32 == at {
                        return Ok(begin);
                    }
                    begin += bytes;
                }
                Err("no such member".into())
            }
            (Type::Struct(_), Place::Bytes { is_buffer: true }) => {
                self.offsets.get(&(id, at)).copied().ok_or_else(|| "a member without an offset".into())
            }
            (Type::Struct(members), _) => members.iter().take(at as usize).map(|member| n_scalars(*member)).sum(),
            (Type::Array(..) | Type::RuntimeArray(_), Place::Bytes { is_buffer: true })
                if self.strides.contains_key(&id) =>
            {
                Ok(self.strides[&id])
            }
            (_, Place::Bytes { .. }) => {
                let [bytes, align] = self.extent(self.component(id, 0)?)?;
                Ok(bytes.next_multiple_of(align))
            }
            _ => n_scalars(self.component(id, 0)?),
        }
    }
}

type Environment = HashMap<Id, Value>;

struct Writer<'a> {
    module: &'a Module<'a>,
    globals: Environment,
    /// Declarations at the kernel's start, since a `goto` must not jump over them, and its statements.
    head: String,
    body: String,
    n_names: u32,
}

impl Writer<'_> {
    /// Declares the module's variables: the kernel's parameters, and what precedes the kernel.
    fn variables(&mut self) -> Result<(String, String), String> {
        let module = self.module;
        let (mut parameters, mut before) = (Vec::new(), String::new());
        for &(id, pointer, class) in &module.variables {
            let pointee = module.pointee(pointer)?;
            let name = format!("g{id}");
            let place = match class {
                StorageClass::StorageBuffer => {
                    let is_read_only = module.read_only.contains(&id);
                    let kind = if is_read_only { "const char *__restrict__" } else { "char *" };
                    parameters.push((module.bindings.get(&id), format!("{kind} {name}, unsigned {name}_bytes")));
                    Place::Bytes { is_buffer: true }
                }
                StorageClass::Uniform => {
                    let _ = writeln!(before, "__constant__ __align__(16) char {name}[256];");
                    Place::Bytes { is_buffer: true }
                }
                StorageClass::Workgroup => {
                    let [bytes, _] = module.extent(pointee)?;
                    let _ = writeln!(before, "__shared__ __align__(16) char {name}[{bytes}];");
                    Place::Bytes { is_buffer: false }
                }
                StorageClass::Private => {
                    let _ = writeln!(self.head, "unsigned {name}[{}];", module.leaves(pointee)?.len());
                    Place::Words
                }
                StorageClass::Input => Place::Input(*module.builtins.get(&id).ok_or("an input that is no builtin")?),
                other => return Err(format!("variables in {other:?} are not supported")),
            };
            self.globals.insert(id, Value::Pointer(Pointer { name, place, offset: "0u".into(), pointee }));
        }
        parameters.sort();
        let parameters: Vec<String> = parameters.into_iter().map(|(_, text)| text).collect();
        Ok((parameters.join(", "), before))
    }

    /// Writes the body of a function with these arguments; returns the names of its result's scalars.
    fn call(&mut self, id: Id, arguments: Vec<Value>) -> Result<Vec<String>, String> {
        let function = self.module.functions.get(&id).ok_or("no such function")?;
        let call = self.n_names;
        self.n_names += 1;
        let mut known: Environment = function.parameters.iter().copied().zip(arguments).collect();
        let leaves = match self.module.of(function.result)? {
            Type::Void => Vec::new(),
            _ => self.module.leaves(function.result)?,
        };
        let results: Vec<String> = (0..leaves.len()).map(|i| format!("r{call}_{i}")).collect();
        for (name, leaf) in results.iter().zip(leaves) {
            let _ = writeln!(self.head, "{} {name};", leaf.name());
        }
        // A phi is a variable that the blocks before it assign.
        let mut assigned: HashMap<Id, Vec<(Id, Id)>> = HashMap::new();
        for instruction in function.blocks.iter().flat_map(|block| &block.instructions).filter(|i| i.op == Op::Phi) {
            let [of, id, pairs @ ..] = instruction.operands else { return Err("a phi of nothing".into()) };
            let leaves = self.module.leaves(*of)?;
            let names: Vec<String> = (0..leaves.len()).map(|i| format!("p{call}_{id}_{i}")).collect();
            for (name, leaf) in names.iter().zip(leaves) {
                let _ = writeln!(self.head, "{} {name};", leaf.name());
            }
            known.insert(*id, Value::Scalars(names));
            pairs.chunks_exact(2).for_each(|pair| assigned.entry(pair[1]).or_default().push((*id, pair[0])));
        }
        for block in &function.blocks {
            let _ = writeln!(self.body, "L{call}_{}:;", block.label);
            for Instruction { op, operands } in &block.instructions {
                let is_end = matches!(
                    op,
                    Op::Branch | Op::BranchConditional | Op::Switch | Op::Return | Op::ReturnValue | Op::Unreachable
                );
                if is_end {
                    for (phi, value) in assigned.get(&block.label).into_iter().flatten() {
                        let pairs = self.scalars(&known, *phi)?.into_iter().zip(self.scalars(&known, *value)?);
                        for (name, value) in pairs {
                            let _ = writeln!(self.body, "{name} = {value};");
                        }
                    }
                }
                let label = |id: u32| format!("goto L{call}_{id};");
                match op {
                    Op::Phi | Op::SelectionMerge | Op::LoopMerge | Op::Line | Op::NoLine | Op::Nop => {}
                    Op::Branch => {
                        let _ = writeln!(self.body, "{}", label(operands[0]));
                    }
                    Op::BranchConditional => {
                        let condition = self.scalars(&known, operands[0])?.join("");
                        let [yes, no] = [label(operands[1]), label(operands[2])];
                        let _ = writeln!(self.body, "if ({condition}) {yes} else {no}");
                    }
                    Op::Switch => {
                        let selector = self.scalars(&known, operands[0])?.join("");
                        let _ = writeln!(self.body, "switch ({selector}) {{");
                        for case in operands[2..].chunks_exact(2) {
                            let _ = writeln!(self.body, "case {:#x}u: {}", case[0], label(case[1]));
                        }
                        let _ = writeln!(self.body, "default: {}\n}}", label(operands[1]));
                    }
                    Op::Return => {
                        let _ = writeln!(self.body, "goto E{call};");
                    }
                    Op::ReturnValue => {
                        let values = self.scalars(&known, operands[0])?;
                        for (name, value) in results.iter().zip(values) {
                            let _ = writeln!(self.body, "{name} = {value};");
                        }
                        let _ = writeln!(self.body, "goto E{call};");
                    }
                    Op::Unreachable => self.body.push_str("__builtin_unreachable();\n"),
                    _ => self.instruction(call, &mut known, *op, operands)?,
                }
            }
        }
        let _ = writeln!(self.body, "E{call}:;");
        Ok(results)
    }

    fn value(&self, known: &Environment, id: Id) -> Result<Value, String> {
        let found = known.get(&id).or_else(|| self.globals.get(&id)).or_else(|| self.module.constants.get(&id));
        found.cloned().ok_or_else(|| format!("value {id} is not defined yet"))
    }

    fn scalars(&self, known: &Environment, id: Id) -> Result<Vec<String>, String> {
        match self.value(known, id)? {
            Value::Scalars(scalars) => Ok(scalars),
            Value::Pointer(_) => Err(format!("{id} is a pointer")),
        }
    }

    fn pointer(&self, known: &Environment, id: Id) -> Result<Pointer, String> {
        match self.value(known, id)? {
            Value::Pointer(pointer) => Ok(pointer),
            Value::Scalars(_) => Err(format!("{id} is no pointer")),
        }
    }

    /// Variables with the values of the expressions.
    fn define(&mut self, name: &str, leaves: &[Scalar], expressions: &[String]) -> Result<Value, String> {
        if leaves.len() != expressions.len() {
            return Err(format!("{} values for {} components", expressions.len(), leaves.len()));
        }
        let mut names = Vec::new();
        for (i, (leaf, expression)) in leaves.iter().zip(expressions).enumerate() {
            let name = format!("{name}_{i}");
            let _ = writeln!(self.head, "{} {name};", leaf.name());
            let _ = writeln!(self.body, "{name} = {expression};");
            names.push(name);
        }
        Ok(Value::Scalars(names))
    }

    fn instruction(&mut self, call: u32, known: &mut Environment, op: Op, operands: Words) -> Result<(), String> {
        let module = self.module;
        match op {
            Op::Store => {
                let (pointer, values) = (self.pointer(known, operands[0])?, self.scalars(known, operands[1])?);
                return self.store(&pointer, pointer.pointee, "0u", &mut values.into_iter());
            }
            Op::ControlBarrier => {
                self.body.push_str("__syncthreads();\n");
                return Ok(());
            }
            Op::MemoryBarrier => {
                self.body.push_str("__threadfence_block();\n");
                return Ok(());
            }
            Op::AtomicStore => {
                let (pointer, value) = (self.pointer(known, operands[0])?, self.scalars(known, operands[3])?);
                let _ = writeln!(self.body, "atomicExch((unsigned *){}, {});", address(&pointer), value.join(""));
                return Ok(());
            }
            _ => {}
        }
        let [of, id, rest @ ..] = operands else { return Err(format!("{op:?} without a result")) };
        let (of, id) = (*of, *id);
        let name = format!("v{call}_{id}");
        let value = match op {
            Op::Variable => {
                let pointee = module.pointee(of)?;
                let _ = writeln!(self.head, "unsigned {name}[{}];", module.leaves(pointee)?.len());
                let pointer = Pointer { name, place: Place::Words, offset: "0u".into(), pointee };
                if let Some(first) = rest.get(1) {
                    let values = self.scalars(known, *first)?;
                    self.store(&pointer, pointee, "0u", &mut values.into_iter())?;
                }
                Value::Pointer(pointer)
            }
            Op::AccessChain | Op::InBoundsAccessChain => {
                let mut pointer = self.pointer(known, rest[0])?;
                for index in &rest[1..] {
                    let at = module.integers.get(index).copied();
                    let step = module.step(pointer.pointee, at.unwrap_or_default(), &pointer.place)?;
                    let offset = match (module.of(pointer.pointee)?, at) {
                        (Type::Struct(_), _) => format!("{step}u"),
                        (_, Some(at)) => format!("{}u", step * at),
                        (_, None) => format!("{} * {step}u", self.scalars(known, *index)?.join("")),
                    };
                    pointer.pointee = module.component(pointer.pointee, at.unwrap_or_default())?;
                    pointer.offset = format!("{} + {offset}", pointer.offset);
                }
                Value::Pointer(pointer)
            }
            Op::Load => {
                let pointer = self.pointer(known, rest[0])?;
                let mut found = Vec::new();
                self.load(&pointer, pointer.pointee, "0u", &mut found)?;
                self.define(&name, &module.leaves(of)?, &found)?
            }
            Op::ArrayLength => {
                let pointer = self.pointer(known, rest[0])?;
                let array = module.component(pointer.pointee, rest[1])?;
                let begin = module.step(pointer.pointee, rest[1], &pointer.place)?;
                let step = module.step(array, 0, &pointer.place)?;
                let length = format!("({}_bytes - {begin}u) / {step}u", pointer.name);
                self.define(&name, &[Scalar::Int { bytes: 4 }], &[length])?
            }
            Op::FunctionCall => {
                let arguments = rest[1..].iter().map(|id| self.value(known, *id)).collect::<Result<_, _>>()?;
                // Calls of one function may follow each other: its names are new each time.
                Value::Scalars(self.call(rest[0], arguments)?)
            }
            Op::CopyObject => self.value(known, rest[0])?,
            Op::CompositeConstruct => {
                let mut all = Vec::new();
                for id in rest {
                    all.extend(self.scalars(known, *id)?);
                }
                Value::Scalars(all)
            }
            Op::CompositeExtract => {
                let mut at = 0;
                let mut within = module.type_of(rest[0])?;
                let all = self.scalars(known, rest[0])?;
                for index in &rest[1..] {
                    at += match module.of(within)? {
                        Type::Struct(_) => module.step(within, *index, &Place::Words)?,
                        _ => module.step(within, 0, &Place::Words)? * index,
                    } as usize;
                    within = module.component(within, *index)?;
                }
                let n = module.leaves(of)?.len();
                Value::Scalars(all.get(at..at + n).ok_or("a component past the end")?.to_vec())
            }
            Op::VectorShuffle => {
                let both = [self.scalars(known, rest[0])?, self.scalars(known, rest[1])?].concat();
                let chosen = rest[2..].iter().map(|&i| both.get(i as usize).cloned().unwrap_or("0".into()));
                Value::Scalars(chosen.collect())
            }
            Op::VectorExtractDynamic => {
                let (all, at) = (self.scalars(known, rest[0])?, self.scalars(known, rest[1])?.join(""));
                let last = all.last().cloned().ok_or("an empty vector")?;
                let choice = all.iter().enumerate().rev().skip(1);
                let chosen = choice.fold(last, |rest, (i, x)| format!("({at} == {i}u ? {x} : {rest})"));
                self.define(&name, &module.leaves(of)?, &[chosen])?
            }
            Op::Transpose | Op::MatrixTimesVector | Op::VectorTimesMatrix | Op::MatrixTimesMatrix => {
                let values = self.matrix(known, op, rest)?;
                self.define(&name, &module.leaves(of)?, &values)?
            }
            Op::ExtInst => {
                let leaves = module.leaves(of)?;
                let operation = GlslStd450Op::from_u32(rest[1]).ok_or("an unknown function of GLSL")?;
                let inputs = rest[2..].iter().map(|id| self.scalars(known, *id)).collect::<Result<Vec<_>, _>>()?;
                let values = extended(operation, leaves.len(), &inputs)?;
                self.define(&name, &leaves, &values)?
            }
            Op::Bitcast => {
                let values = self.scalars(known, rest[0])?;
                let from = module.leaves(module.type_of(rest[0])?)?;
                let leaves = module.leaves(of)?;
                let cast = cast(&from, &values, &leaves)?;
                self.define(&name, &leaves, &cast)?
            }
            Op::AtomicLoad => {
                let word = address(&self.pointer(known, rest[0])?);
                self.define(&name, &module.leaves(of)?, &[format!("*(volatile unsigned *){word}")])?
            }
            _ if name_of_atomic(op).is_some() => {
                let word = address(&self.pointer(known, rest[0])?);
                let mut inputs = Vec::new();
                let ids = match (op, rest) {
                    (Op::AtomicCompareExchange, [_, _, _, _, value, expected]) => vec![*expected, *value],
                    _ => rest.get(3..).unwrap_or_default().to_vec(),
                };
                for id in &ids {
                    inputs.extend(self.scalars(known, *id)?);
                }
                let [sign, negate] = match op {
                    Op::AtomicSMin | Op::AtomicSMax => ["int", ""],
                    Op::AtomicISub => ["unsigned", "-"],
                    _ => ["unsigned", ""],
                };
                let inputs: Vec<String> = inputs.iter().map(|x| format!("{negate}({sign}){x}")).collect();
                let function = name_of_atomic(op).unwrap_or_default();
                let old = format!("(unsigned){function}(({sign} *){word}, {})", inputs.join(", "));
                self.define(&name, &module.leaves(of)?, &[old])?
            }
            _ => {
                let leaves = module.leaves(of)?;
                let subgroup = subgroup(op, rest)?;
                let ids = subgroup.as_ref().map_or(rest, |(_, ids)| *ids);
                let inputs = ids.iter().map(|id| self.scalars(known, *id)).collect::<Result<Vec<_>, _>>()?;
                let mut values = Vec::new();
                let scalar = match ids.first() {
                    Some(id) => module.scalar(module.type_of(*id)?)?,
                    None => leaves[0],
                };
                if let Some((function, _)) = &subgroup {
                    for i in 0..leaves.len() {
                        let inputs: Vec<&str> = inputs.iter().map(|x| x[i % x.len()].as_str()).collect();
                        values.push(format!("{function}({})", inputs.join(", ")));
                    }
                    if op == Op::GroupNonUniformBallot {
                        values =
                            [format!("{function}({})", inputs[0][0]), "0u".into(), "0u".into(), "0u".into()].to_vec();
                    }
                } else if op == Op::Dot {
                    let terms = inputs[0].iter().zip(&inputs[1]).map(|(a, b)| format!("{a} * {b}"));
                    values.push(terms.collect::<Vec<_>>().join(" + "));
                } else if matches!(op, Op::Any | Op::All) {
                    values.push(inputs[0].join(if op == Op::Any { " || " } else { " && " }));
                } else {
                    for i in 0..leaves.len() {
                        let inputs: Vec<&str> = inputs.iter().map(|x| x[i % x.len()].as_str()).collect();
                        values.push(expression(op, scalar, leaves[i], &inputs)?);
                    }
                }
                self.define(&name, &leaves, &values)?
            }
        };
        known.insert(id, value);
        Ok(())
    }

    /// The scalars of the type at `within` units past a pointer.
    fn load(&mut self, pointer: &Pointer, of: Id, within: &str, found: &mut Vec<String>) -> Result<(), String> {
        let module = self.module;
        let of_place = module.of(of)?;
        match (&pointer.place, of_place) {
            (Place::Input(builtin), _) => {
                let size = module.local_size;
                found.extend((0..module.leaves(of)?.len()).map(|axis| input(*builtin, axis, size)));
            }
            (_, Type::Scalar(scalar)) => found.push(match pointer.place {
                Place::Words => scalar.of_bits(&format!("{}[{} + {within}]", pointer.name, pointer.offset)),
                _ => {
                    let word = if *scalar == Scalar::Bool { Scalar::Int { bytes: 4 } } else { *scalar };
                    let value = format!(
                        "*({} *)({} + ({} + {within}))",
                        self.typed(pointer, word.name()),
                        pointer.name,
                        pointer.offset
                    );
                    if *scalar == Scalar::Bool { format!("({value} != 0u)") } else { value }
                }
            }),
            (Place::Bytes { .. }, Type::Vector(element, n))
                if vector_name(*n * module.scalar(*element)?.bytes()).is_some() =>
            {
                let scalar = module.scalar(*element)?;
                let kind = vector_name(*n * scalar.bytes()).unwrap_or_default();
                let name = format!("m{}", self.n_names);
                self.n_names += 1;
                let _ = writeln!(self.head, "{kind} {name};");
                let source = self.typed(pointer, kind);
                let _ =
                    writeln!(self.body, "{name} = *({source} *)({} + ({} + {within}));", pointer.name, pointer.offset);
                let words: Vec<String> = ["x", "y", "z", "w"].iter().map(|part| format!("{name}.{part}")).collect();
                found.extend((0..*n).map(|i| {
                    let at = i * scalar.bytes();
                    let word = &words[(at / 4) as usize];
                    scalar.of_bits(&if at % 4 == 0 { word.clone() } else { format!("{word} >> {}u", at % 4 * 8) })
                }));
            }
            _ => {
                for (component, within) in self.components(pointer, of, within)? {
                    self.load(pointer, component, &within, found)?;
                }
            }
        }
        Ok(())
    }

    fn store(
        &mut self,
        pointer: &Pointer,
        of: Id,
        within: &str,
        values: &mut impl Iterator<Item = String>,
    ) -> Result<(), String> {
        let module = self.module;
        match (&pointer.place, module.of(of)?) {
            (Place::Input(_), _) => return Err("an input is written".into()),
            (place, Type::Scalar(scalar)) => {
                let value = values.next().ok_or("a value with too few components")?;
                let target = match place {
                    Place::Words => {
                        format!("{}[{} + {within}] = {}", pointer.name, pointer.offset, scalar.to_bits(&value))
                    }
                    _ if *scalar == Scalar::Bool => {
                        format!("*(unsigned *)({} + ({} + {within})) = {value}", pointer.name, pointer.offset)
                    }
                    _ => {
                        format!("*({} *)({} + ({} + {within})) = {value}", scalar.name(), pointer.name, pointer.offset)
                    }
                };
                let _ = writeln!(self.body, "{target};");
            }
            (Place::Bytes { .. }, Type::Vector(element, n))
                if vector_name(*n * module.scalar(*element)?.bytes()).is_some() =>
            {
                let scalar = module.scalar(*element)?;
                let kind = vector_name(*n * scalar.bytes()).unwrap_or_default();
                let bits: Vec<String> = values.take(*n as usize).map(|value| scalar.to_bits(&value)).collect();
                let words: Vec<String> = bits
                    .chunks((4 / scalar.bytes()) as usize)
                    .map(|parts| {
                        let shifted = parts
                            .iter()
                            .enumerate()
                            .map(|(i, part)| format!("((unsigned){part} << {}u)", i as u32 * 8 * scalar.bytes()));
                        shifted.collect::<Vec<_>>().join(" | ")
                    })
                    .collect();
                let _ = writeln!(
                    self.body,
                    "*({kind} *)({} + ({} + {within})) = make_{kind}({});",
                    pointer.name,
                    pointer.offset,
                    words.join(", ")
                );
            }
            _ => {
                for (component, within) in self.components(pointer, of, within)? {
                    self.store(pointer, component, &within, values)?;
                }
            }
        }
        Ok(())
    }

    /// The components of a type, and where they are.
    fn components(&self, pointer: &Pointer, of: Id, within: &str) -> Result<Vec<(Id, String)>, String> {
        let module = self.module;
        let n = match module.of(of)? {
            Type::Vector(_, n) | Type::Matrix(_, n) | Type::Array(_, n) => *n,
            Type::Struct(members) => members.len() as u32,
            other => return Err(format!("{other:?} has no components")),
        };
        let is_struct = matches!(module.of(of)?, Type::Struct(_));
        (0..n)
            .map(|at| {
                let step = module.step(of, at, &pointer.place)?;
                Ok((module.component(of, at)?, format!("{within} + {}u", if is_struct { step } else { step * at })))
            })
            .collect()
    }

    /// The C++ type that a pointer's place is read as.
    fn typed(&self, pointer: &Pointer, kind: &str) -> String {
        let is_read_only = self.module.read_only.iter().any(|id| pointer.name == format!("g{id}"));
        if is_read_only { format!("const {kind}") } else { kind.to_string() }
    }

    fn matrix(&self, known: &Environment, op: Op, rest: Words) -> Result<Vec<String>, String> {
        let module = self.module;
        // Columns and rows; a vector is a column on the right side and a row on the left one.
        let shape = |id: Id, is_right: bool| {
            Ok::<_, String>(match module.of(module.type_of(id)?)? {
                Type::Matrix(column, n) => [*n as usize, module.leaves(*column)?.len()],
                Type::Vector(_, n) if is_right => [1, *n as usize],
                Type::Vector(_, n) => [*n as usize, 1],
                other => return Err(format!("{other:?} is no matrix")),
            })
        };
        let left = self.scalars(known, rest[0])?;
        let [n_columns, n_rows] = shape(rest[0], false)?;
        if op == Op::Transpose {
            let places = (0..n_rows).flat_map(|row| (0..n_columns).map(move |column| (row, column)));
            return Ok(places.map(|(row, column)| left[column * n_rows + row].clone()).collect());
        }
        let right = self.scalars(known, rest[1])?;
        let [n_right, depth] = shape(rest[1], true)?;
        let places = (0..n_right).flat_map(|column| (0..n_rows).map(move |row| (column, row)));
        let sum = |(column, row): (usize, usize)| {
            let terms = (0..depth).map(|k| format!("{} * {}", left[k * n_rows + row], right[column * depth + k]));
            terms.collect::<Vec<_>>().join(" + ")
        };
        Ok(places.map(sum).collect())
    }
}

/// The C++ vector of so many bytes.
fn vector_name(bytes: u32) -> Option<&'static str> {
    [(8, "uint2"), (16, "uint4")].into_iter().find(|&(known, _)| known == bytes).map(|(_, name)| name)
}

/// The address of a word.
fn address(pointer: &Pointer) -> String {
    format!("({} + ({}))", pointer.name, pointer.offset)
}

fn input(builtin: BuiltIn, axis: usize, size: [u32; 3]) -> String {
    let axis_name = ["x", "y", "z"][axis.min(2)];
    let before: u32 = size[..axis.min(3)].iter().product();
    let local = format!("(threadIdx.x / {before}u % {}u)", size[axis.min(2)]);
    match builtin {
        BuiltIn::WorkgroupId => format!("blockIdx.{axis_name}"),
        BuiltIn::NumWorkgroups => format!("gridDim.{axis_name}"),
        BuiltIn::LocalInvocationId => local,
        BuiltIn::GlobalInvocationId => format!("(blockIdx.{axis_name} * {}u + {local})", size[axis.min(2)]),
        BuiltIn::LocalInvocationIndex => "threadIdx.x".into(),
        BuiltIn::SubgroupSize => "32u".into(),
        BuiltIn::SubgroupLocalInvocationId => "(threadIdx.x % 32u)".into(),
        BuiltIn::SubgroupId => "(threadIdx.x / 32u)".into(),
        BuiltIn::NumSubgroups => format!("{}u", size.iter().product::<u32>().div_ceil(32)),
        other => format!("NO_BUILTIN_{other:?}"),
    }
}

/// Scalars of the same bits in other types.
fn cast(from: &[Scalar], values: &[String], to: &[Scalar]) -> Result<Vec<String>, String> {
    if from.len() == to.len() {
        let pairs = from.iter().zip(values).zip(to);
        return Ok(pairs.map(|((from, value), to)| to.of_bits(&from.to_bits(value))).collect());
    }
    let (Some(whole), Some(part)) = (from.first(), to.first()) else { return Err("a cast of nothing".into()) };
    if whole.bytes() > part.bytes() {
        let n = whole.bytes() / part.bytes();
        let parts = values.iter().flat_map(|value| (0..n).map(move |i| (value, i)));
        return Ok(parts
            .map(|(value, i)| part.of_bits(&format!("{} >> {}u", whole.to_bits(value), 8 * part.bytes() * i)))
            .collect());
    }
    let n = (part.bytes() / whole.bytes()) as usize;
    let joined = |parts: &[String]| {
        let shifted = parts
            .iter()
            .enumerate()
            .map(|(i, value)| format!("((unsigned){} << {}u)", whole.to_bits(value), 8 * whole.bytes() * i as u32));
        part.of_bits(&shifted.collect::<Vec<_>>().join(" | "))
    };
    Ok(values.chunks(n).map(joined).collect())
}

/// The function for an operation of a subgroup, and the operands that it takes.
fn subgroup(op: Op, rest: Words) -> Result<Option<(String, Words)>, String> {
    let alone = |name: &str| Ok(Some((name.to_string(), &rest[1..])));
    let of_all = |name: &str| {
        let kind = match GroupOperation::from_u32(rest[1]) {
            Some(GroupOperation::Reduce) => "reduce",
            Some(GroupOperation::InclusiveScan) => "inclusive",
            Some(GroupOperation::ExclusiveScan) => "exclusive",
            other => return Err(format!("{other:?} is not supported")),
        };
        Ok(Some((format!("{kind}<{name}>"), &rest[2..])))
    };
    match op {
        Op::GroupNonUniformElect => alone("elect"),
        Op::GroupNonUniformAll => alone("all"),
        Op::GroupNonUniformAny => alone("any"),
        Op::GroupNonUniformBallot => alone("ballot"),
        Op::GroupNonUniformBroadcast | Op::GroupNonUniformShuffle => alone("shuffle"),
        Op::GroupNonUniformBroadcastFirst => alone("first"),
        Op::GroupNonUniformShuffleXor => alone("shuffle_xor"),
        Op::GroupNonUniformShuffleUp => alone("shuffle_up"),
        Op::GroupNonUniformShuffleDown => alone("shuffle_down"),
        Op::GroupNonUniformIAdd | Op::GroupNonUniformFAdd => of_all("Sum"),
        Op::GroupNonUniformUMax | Op::GroupNonUniformFMax => of_all("Max"),
        Op::GroupNonUniformUMin | Op::GroupNonUniformFMin => of_all("Min"),
        Op::GroupNonUniformBitwiseOr => of_all("Or"),
        _ => Ok(None),
    }
}

fn name_of_atomic(op: Op) -> Option<&'static str> {
    Some(match op {
        Op::AtomicIAdd | Op::AtomicISub => "atomicAdd",
        Op::AtomicExchange => "atomicExch",
        Op::AtomicCompareExchange => "atomicCAS",
        Op::AtomicUMin | Op::AtomicSMin => "atomicMin",
        Op::AtomicUMax | Op::AtomicSMax => "atomicMax",
        Op::AtomicAnd => "atomicAnd",
        Op::AtomicOr => "atomicOr",
        Op::AtomicXor => "atomicXor",
        _ => return None,
    })
}

/// A component of the result of an operation on components.
fn expression(op: Op, from: Scalar, to: Scalar, inputs: &[&str]) -> Result<String, String> {
    let signed = match from {
        Scalar::Int { bytes: 1 } => "signed char",
        Scalar::Int { bytes: 2 } => "short",
        _ => "int",
    };
    let infix = match op {
        Op::IAdd | Op::FAdd => "+",
        Op::ISub | Op::FSub => "-",
        Op::IMul | Op::FMul | Op::VectorTimesScalar | Op::MatrixTimesScalar => "*",
        Op::UDiv | Op::FDiv => "/",
        Op::UMod => "%",
        Op::ShiftLeftLogical => "<<",
        Op::ShiftRightLogical => ">>",
        Op::BitwiseAnd => "&",
        Op::BitwiseOr => "|",
        Op::BitwiseXor => "^",
        Op::LogicalAnd => "&&",
        Op::LogicalOr => "||",
        Op::IEqual | Op::FOrdEqual | Op::LogicalEqual => "==",
        Op::INotEqual | Op::FUnordNotEqual | Op::FOrdNotEqual | Op::LogicalNotEqual => "!=",
        Op::ULessThan | Op::FOrdLessThan => "<",
        Op::ULessThanEqual | Op::FOrdLessThanEqual => "<=",
        Op::UGreaterThan | Op::FOrdGreaterThan => ">",
        Op::UGreaterThanEqual | Op::FOrdGreaterThanEqual => ">=",
        _ => "",
    };
    let of_signed = match op {
        Op::SDiv => "/",
        Op::SRem => "%",
        Op::SLessThan => "<",
        Op::SLessThanEqual => "<=",
        Op::SGreaterThan => ">",
        Op::SGreaterThanEqual => ">=",
        _ => "",
    };
    Ok(match (op, inputs) {
        (_, [a, b]) if !infix.is_empty() => format!("({}){a} {infix} {b}", from.name()),
        (_, [a, b]) if !of_signed.is_empty() => format!("(int){a} {of_signed} (int){b}"),
        (Op::ShiftRightArithmetic, [a, b]) => format!("(int){a} >> {b}"),
        (Op::FRem, [a, b]) => format!("fmodf({a}, {b})"),
        (Op::SDot | Op::UDot, [a, b, ..]) => {
            let kind = if op == Op::SDot { "int" } else { "unsigned" };
            format!("__dp4a(({kind}){a}, ({kind}){b}, ({kind})0)")
        }
        (Op::SNegate, [a]) => format!("0u - {a}"),
        (Op::FNegate, [a]) => format!("-{a}"),
        (Op::Not, [a]) => format!("~{a}"),
        (Op::LogicalNot, [a]) => format!("!{a}"),
        (Op::Select, [condition, a, b]) => format!("{condition} ? {a} : {b}"),
        (Op::IsNan, [a]) => format!("{a} != {a}"),
        (Op::IsInf, [a]) => format!("isinf({a})"),
        (Op::ConvertFToU, [a]) => format!("(unsigned)(float){a}"),
        (Op::ConvertFToS, [a]) => format!("(unsigned)(int)(float){a}"),
        (Op::ConvertUToF, [a]) => format!("({})(float){a}", to.name()),
        (Op::ConvertSToF, [a]) => format!("({})(float)({signed}){a}", to.name()),
        (Op::UConvert, [a]) => format!("({}){a}", to.name()),
        (Op::SConvert, [a]) => format!("({})(int)({signed}){a}", to.name()),
        (Op::FConvert, [a]) => format!("({})(float){a}", to.name()),
        (Op::BitFieldUExtract, [a, offset, n]) => format!("bits_of({a}, {offset}, {n})"),
        (Op::BitFieldSExtract, [a, offset, n]) => format!("signed_bits_of({a}, {offset}, {n})"),
        (Op::BitFieldInsert, [a, b, offset, n]) => format!("with_bits({a}, {b}, {offset}, {n})"),
        (Op::BitCount, [a]) => format!("__popc({a})"),
        (Op::BitReverse, [a]) => format!("__brev({a})"),
        _ => return Err(format!("{op:?} is not supported")),
    })
}

/// The components of a result of a function of GLSL.
fn extended(op: GlslStd450Op, n: usize, inputs: &[Vec<String>]) -> Result<Vec<String>, String> {
    if op == GlslStd450Op::UnpackHalf2x16 {
        let word = inputs[0].join("");
        return Ok(vec![format!("(float)low_half({word})"), format!("(float)low_half({word} >> 16u)")]);
    }
    if op == GlslStd450Op::PackHalf2x16 {
        return Ok(vec![format!("two_halves({})", inputs[0].join(", "))]);
    }
    let function = match op {
        GlslStd450Op::FAbs => "fabsf",
        GlslStd450Op::SAbs => "absolute",
        GlslStd450Op::FSign => "sign",
        GlslStd450Op::Floor => "floorf",
        GlslStd450Op::Ceil => "ceilf",
        GlslStd450Op::Fract => "fraction",
        GlslStd450Op::RoundEven | GlslStd450Op::Round => "rintf",
        GlslStd450Op::Trunc => "truncf",
        GlslStd450Op::Sqrt => "sqrtf",
        GlslStd450Op::InverseSqrt => "rsqrtf",
        GlslStd450Op::Exp => "expf",
        GlslStd450Op::Exp2 => "exp2f",
        GlslStd450Op::Log => "logf",
        GlslStd450Op::Log2 => "log2f",
        GlslStd450Op::Pow => "powf",
        GlslStd450Op::Sin => "sinf",
        GlslStd450Op::Cos => "cosf",
        GlslStd450Op::Tanh => "tanhf",
        GlslStd450Op::FMin | GlslStd450Op::NMin | GlslStd450Op::UMin => "least",
        GlslStd450Op::FMax | GlslStd450Op::NMax | GlslStd450Op::UMax => "most",
        GlslStd450Op::SMin => "signed_least",
        GlslStd450Op::SMax => "signed_most",
        GlslStd450Op::FClamp | GlslStd450Op::NClamp | GlslStd450Op::UClamp => "within",
        GlslStd450Op::SClamp => "signed_within",
        GlslStd450Op::FMix => "mix",
        GlslStd450Op::Step => "step_at",
        GlslStd450Op::Fma => "fused",
        GlslStd450Op::Ldexp => "scaled",
        GlslStd450Op::FindILsb => "lowest_bit",
        GlslStd450Op::FindUMsb => "highest_bit",
        other => return Err(format!("{other:?} is not supported")),
    };
    let of = |i: usize| inputs.iter().map(|x| x[i % x.len()].as_str()).collect::<Vec<_>>().join(", ");
    Ok((0..n).map(|i| format!("{function}({})", of(i))).collect())
}
