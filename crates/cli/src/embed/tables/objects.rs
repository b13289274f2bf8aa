//! Conversion between JSON objects and columns.

use std::sync::Arc;

use arrow_array::cast::AsArray;
use arrow_array::types::{
    Float32Type, Float64Type, Int8Type, Int16Type, Int32Type, Int64Type, UInt8Type, UInt16Type, UInt32Type, UInt64Type,
};
use arrow_array::{
    Array, ArrayRef, BooleanArray, Float64Array, Int64Array, RecordBatch, RecordBatchOptions, StringArray,
};
use arrow_schema::{ArrowError, DataType, Field, Schema, SchemaRef};
use serde_json::{Map, Value};

use super::super::error::RecordFault;

type Object = Map<String, Value>;

/// The schema of these objects: booleans, integers or floats where all values are, else text. It always has the text
/// column.
pub fn infer(objects: &[Object], text_column: &str) -> SchemaRef {
    let mut columns: Vec<(&str, DataType)> = Vec::new();
    for (name, value) in objects.iter().flatten() {
        match columns.iter_mut().find(|(known, _)| known == name) {
            Some((_, column)) => *column = common(column, &type_of(value)),
            None => columns.push((name, type_of(value))),
        }
    }
    match columns.iter_mut().find(|(known, _)| *known == text_column) {
        Some((_, column)) => *column = DataType::Utf8,
        None => columns.push((text_column, DataType::Utf8)),
    }
    let field = |(name, column): (&str, DataType)| match column {
        DataType::Null => Field::new(name, DataType::Utf8, true),
        column => Field::new(name, column, true),
    };
    Arc::new(Schema::new(columns.into_iter().map(field).collect::<Vec<_>>()))
}

fn type_of(value: &Value) -> DataType {
    match value {
        Value::Null => DataType::Null,
        Value::Bool(_) => DataType::Boolean,
        Value::Number(number) if number.is_i64() => DataType::Int64,
        Value::Number(number) if number.is_f64() => DataType::Float64,
        _ => DataType::Utf8,
    }
}

fn common(a: &DataType, b: &DataType) -> DataType {
    match (a, b) {
        _ if a == b => a.clone(),
        (DataType::Null, other) | (other, DataType::Null) => other.clone(),
        (DataType::Int64, DataType::Float64) | (DataType::Float64, DataType::Int64) => DataType::Float64,
        _ => DataType::Utf8,
    }
}

/// The first field of an object that does not fit the columns.
pub fn misfit(object: &Object, schema: &Schema) -> Option<RecordFault> {
    object.iter().find_map(|(name, value)| {
        let Ok(field) = schema.field_with_name(name) else {
            return Some(RecordFault::value(name, "new", "a field of the first records"));
        };
        let fits = common(&type_of(value), field.data_type()) == *field.data_type();
        (!fits).then(|| {
            RecordFault::value(name, value.to_string(), format!("{} as in earlier records", field.data_type()))
        })
    })
}

/// The objects as columns; a value that does not fit is null.
pub fn table(objects: &[Object], schema: &SchemaRef) -> Result<RecordBatch, ArrowError> {
    let column = |field: &Arc<Field>| -> ArrayRef {
        let values = objects.iter().map(|object| object.get(field.name()).filter(|value| !value.is_null()));
        match field.data_type() {
            DataType::Boolean => Arc::new(values.map(|v| v?.as_bool()).collect::<BooleanArray>()),
            DataType::Int64 => Arc::new(values.map(|v| v?.as_i64()).collect::<Int64Array>()),
            DataType::Float64 => Arc::new(values.map(|v| v?.as_f64()).collect::<Float64Array>()),
            _ => Arc::new(values.map(|v| v.map(plain)).collect::<StringArray>()),
        }
    };
    let options = RecordBatchOptions::new().with_row_count(Some(objects.len()));
    RecordBatch::try_new_with_options(schema.clone(), schema.fields().iter().map(column).collect(), &options)
}

/// A value as text: strings unchanged, null as an empty string, all else as JSON.
pub fn plain(value: &Value) -> String {
    match value {
        Value::Null => String::new(),
        Value::String(text) => text.clone(),
        other => other.to_string(),
    }
}

/// Whether [`cell`] supports columns of this type.
pub fn is_plain(data_type: &DataType) -> bool {
    data_type.is_numeric() && !matches!(data_type, DataType::Float16) && !is_decimal(data_type)
        || matches!(data_type, DataType::Null | DataType::Boolean)
        || super::holds_text(data_type)
}

fn is_decimal(data_type: &DataType) -> bool {
    use DataType::{Decimal32, Decimal64, Decimal128, Decimal256};
    matches!(data_type, Decimal32(..) | Decimal64(..) | Decimal128(..) | Decimal256(..))
}

/// One cell of a column whose type [`is_plain`].
pub fn cell(column: &ArrayRef, row: usize) -> Value {
    if column.is_null(row) {
        return Value::Null;
    }
    match column.data_type() {
        DataType::Boolean => column.as_boolean().value(row).into(),
        DataType::Int8 => column.as_primitive::<Int8Type>().value(row).into(),
        DataType::Int16 => column.as_primitive::<Int16Type>().value(row).into(),
        DataType::Int32 => column.as_primitive::<Int32Type>().value(row).into(),
        DataType::Int64 => column.as_primitive::<Int64Type>().value(row).into(),
        DataType::UInt8 => column.as_primitive::<UInt8Type>().value(row).into(),
        DataType::UInt16 => column.as_primitive::<UInt16Type>().value(row).into(),
        DataType::UInt32 => column.as_primitive::<UInt32Type>().value(row).into(),
        DataType::UInt64 => column.as_primitive::<UInt64Type>().value(row).into(),
        DataType::Float32 => column.as_primitive::<Float32Type>().value(row).into(),
        DataType::Float64 => column.as_primitive::<Float64Type>().value(row).into(),
        DataType::Utf8 => column.as_string::<i32>().value(row).into(),
        DataType::LargeUtf8 => column.as_string::<i64>().value(row).into(),
        DataType::Utf8View => column.as_string_view().value(row).into(),
        _ => Value::Null,
    }
}
