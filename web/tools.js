/** The tool that the page has for a model: a calculator, which the page itself is. */

const SIGNS = { add: "+", subtract: "−", multiply: "×", divide: "÷" };
const OPERATIONS = {
  add: (a, b) => a + b, subtract: (a, b) => a - b, multiply: (a, b) => a * b, divide: (a, b) => a / b,
};

export const TOOLS = [{
  type: "function",
  function: {
    name: "calculator",
    description: "Adds, subtracts, multiplies or divides two numbers.",
    parameters: {
      type: "object",
      properties: {
        a: { type: "integer" }, b: { type: "integer" },
        operation: { type: "string", enum: Object.keys(OPERATIONS) },
      },
      required: ["a", "b", "operation"],
    },
  },
}];

/** What a call gives, as text. A model may call anything, so that an error is a result, too. */
export function run({ name, arguments: given }) {
  try {
    const { a, b, operation } = JSON.parse(given);
    const isKnown = name === "calculator" && Object.hasOwn(OPERATIONS, operation);
    if (!isKnown || typeof a !== "number" || typeof b !== "number") throw new Error(`no tool does ${name}(${given})`);
    return String(OPERATIONS[operation](a, b));
  } catch (error) {
    return `error: ${error.message}`;
  }
}

/** A call in words that people read. */
export function wordsOf({ name, arguments: given, result }) {
  let call = `${name}(${given})`;
  try {
    const { a, b, operation } = JSON.parse(given);
    if (name === "calculator" && Object.hasOwn(SIGNS, operation)) call = `calculator: ${a} ${SIGNS[operation]} ${b}`;
  } catch { /* the call is not complete, or no JSON */ }
  return result === undefined ? call : `${call} = ${result}`;
}
