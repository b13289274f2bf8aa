// Arithmetic for the calculator tool: numbers, + - * / % ^, brackets, and a few functions and constants. No DOM in here.
//
//     sum     = product (("+" | "-") product)*
//     product = power (("*" | "/" | "%") power)*
//     power   = ("-" | "+") power | atom ("^" power)?          -2^2 is -4, and 2^3^2 is 2^9
//     atom    = number | constant | function "(" sum ("," sum)* ")" | "(" sum ")"

const CONSTANTS: Record<string, number> = { pi: Math.PI, e: Math.E, tau: 2 * Math.PI };
const FUNCTIONS: Record<string, (...given: number[]) => number> = {
  sqrt: Math.sqrt, cbrt: Math.cbrt, abs: Math.abs, round: Math.round, floor: Math.floor, ceil: Math.ceil, exp: Math.exp, ln: Math.log,
  log: Math.log10, log2: Math.log2, sin: Math.sin, cos: Math.cos, tan: Math.tan, asin: Math.asin, acos: Math.acos, atan: Math.atan,
  min: Math.min, max: Math.max,
};
const TOKEN = /\s*(?:(\d+\.?\d*(?:e[+-]?\d+)?|\.\d+(?:e[+-]?\d+)?)|([a-z]\w*)|(\*\*|[-+*/%^(),×÷−]))/iy;
const SAME: Record<string, string> = { "**": "^", "×": "*", "÷": "/", "−": "-" };
const MAX_CHARACTERS = 1000;
const MAX_DEPTH = 100;

interface Token {
  kind: "number" | "name" | "sign";
  text: string;
}

/**
 * The value of an expression.
 *
 * Throws an `Error` that says what was expected and found if it is none, or has no finite value.
 */
export function calculate(expression: string): number {
  if (expression.length > MAX_CHARACTERS) throw new Error(`the expression has ${expression.length} characters, at most ${MAX_CHARACTERS} are read`);
  const tokens = tokensOf(expression);
  let [at, depth] = [0, 0];
  const takes = (...signs: string[]): string | undefined => {
    const token = tokens[at];
    if (token?.kind !== "sign" || !signs.includes(token.text)) return undefined;
    at += 1;
    return token.text;
  };
  const expect = (sign: string): void => {
    if (takes(sign) === undefined) throw new Error(`expected ${sign}, found ${tokens[at]?.text ?? "the end"}`);
  };
  const sum = (): number => {
    depth += 1;
    if (depth > MAX_DEPTH) throw new Error(`brackets are deeper than ${MAX_DEPTH}`);
    let value = product();
    for (let sign = takes("+", "-"); sign !== undefined; sign = takes("+", "-")) value = sign === "+" ? value + product() : value - product();
    depth -= 1;
    return value;
  };
  const product = (): number => {
    let value = power();
    for (let sign = takes("*", "/", "%"); sign !== undefined; sign = takes("*", "/", "%")) {
      const other = power();
      if (sign !== "*" && other === 0) throw new Error("division by zero");
      value = sign === "*" ? value * other : sign === "/" ? value / other : value % other;
    }
    return value;
  };
  const power = (): number => {
    const sign = takes("-", "+");
    if (sign !== undefined) return sign === "-" ? -power() : power();
    const base = atom();
    return takes("^") === undefined ? base : base ** power();
  };
  const atom = (): number => {
    if (takes("(") !== undefined) {
      const value = sum();
      expect(")");
      return value;
    }
    const token = tokens[at];
    if (token === undefined || token.kind === "sign") throw new Error(`expected a number, found ${token?.text ?? "the end"}`);
    at += 1;
    if (token.kind === "number") return Number(token.text);
    const name = token.text.toLowerCase();
    const constant = Object.hasOwn(CONSTANTS, name) ? CONSTANTS[name] : undefined;
    if (constant !== undefined) return constant;
    const apply = Object.hasOwn(FUNCTIONS, name) ? FUNCTIONS[name] : undefined;
    if (apply === undefined) throw new Error(`there is no ${token.text}; there are ${[...Object.keys(CONSTANTS), ...Object.keys(FUNCTIONS)].join(", ")}`);
    expect("(");
    const given = [sum()];
    while (takes(",") !== undefined) given.push(sum());
    expect(")");
    return apply(...given);
  };
  const value = sum();
  if (at < tokens.length) throw new Error(`expected the end, found ${tokens[at]?.text}`);
  if (!Number.isFinite(value)) throw new Error("the value is no finite number");
  return value;
}

function tokensOf(expression: string): Token[] {
  const tokens: Token[] = [];
  const text = expression.trimEnd();
  TOKEN.lastIndex = 0;
  while (TOKEN.lastIndex < text.length) {
    const start = TOKEN.lastIndex;
    const match = TOKEN.exec(text);
    if (match === null) throw new Error(`expected a number, a name or a sign, found ${text.slice(start).trim().slice(0, 10)}`);
    const [, number, name, sign = ""] = match;
    if (number !== undefined) tokens.push({ kind: "number", text: number });
    else if (name !== undefined) tokens.push({ kind: "name", text: name });
    else tokens.push({ kind: "sign", text: SAME[sign] ?? sign });
  }
  return tokens;
}
