import type { ReactNode } from "react";
export function Lanes(): ReactNode { return null; }
