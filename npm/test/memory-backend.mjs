// The place of the browser's storage in tests: what a `Store` writes, in memory.

export class MemoryBackend {
  records = new Map();
  bytes = new Map();

  async keys() {
    return [...new Set([...this.records.keys(), ...this.bytes.keys()])];
  }

  async readRecord(key) {
    return structuredClone(this.records.get(key));
  }

  async writeRecord(key, record) {
    this.records.set(key, structuredClone(record));
  }

  async readBytes(key) {
    return new Blob([this.bytes.get(key)]);
  }

  async openWriter(key, at) {
    let pieces = [(this.bytes.get(key) ?? Buffer.alloc(0)).subarray(0, at)];
    const flush = async () => {
      pieces = [Buffer.concat(pieces)];
      this.bytes.set(key, pieces[0]);
      return pieces[0].length;
    };
    return { write: async (piece) => void pieces.push(Buffer.from(piece)), flush, close() {} };
  }

  async remove(key) {
    this.records.delete(key);
    this.bytes.delete(key);
  }
}
